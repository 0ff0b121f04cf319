"""What a recording says of a training iteration, and that nothing of the training changes."""

from __future__ import annotations

import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensorpager as tp
from tensorpager.pager.debug.check import check_invariants
from tensorpager.planner.commands.plan import checked
from tensorpager.planner.hardware import Hardware
from tensorpager.planner.lifetimes import live_pages as live_pages_of
from tensorpager.planner.lifetimes import working_set_pages
from tensorpager.planner.registry import make_plan
from tensorpager.planner.trace import ACCESS_NAMES, WRITE, Trace
from tensorpager.planner.trace_file import read_trace, write_trace

from .models import PAGE_BYTES, World, assert_same, loss_of, make_pager, mlp, plain, train

STEP_OPS = ("aten::addcdiv_", "aten::lerp_", "aten::addcmul_", "aten::mul_", "aten::add_")


class Block(nn.Module):
    """Takes and gives ``[batch, 256]``; its ``mix`` is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.mix(self.mix(x) * 0.5)) + x


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(128, 256)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inward(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(torch.sigmoid(x))


Make = Callable[[], nn.Module]
Optimizer = Callable[..., torch.optim.Optimizer]


@contextmanager
def trained(make: Make = mlp, kind: Optimizer = torch.optim.AdamW, **options: Any) -> Iterator[Any]:
    """A pager, its model and optimizer after two iterations."""
    torch.manual_seed(1)
    with make_pager(policy="lru", **options) as pager:
        world = World(pager)
        model = world.module(make())
        optimizer = world.optimizer(kind(model.parameters(), lr=1e-3))
        train(world, model, optimizer, 2)
        yield pager, model, optimizer


def iterate(pager: tp.Pager, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    train(World(pager), model, optimizer, 1)


@contextmanager
def recorded(pager: tp.Pager) -> Iterator[list[Trace]]:
    """The trace is in the list when the block has ended."""
    found: list[Trace] = []
    with TemporaryDirectory() as folder:
        with pager.record(Path(folder, "a.parquet")):
            yield found
        found.append(read_trace(Path(folder, "a.parquet")))


def record(pager: tp.Pager, model: nn.Module, optimizer: torch.optim.Optimizer) -> Trace:
    with recorded(pager) as found:
        iterate(pager, model, optimizer)
    return found[0]


@pytest.fixture
def trace(one_thread: None) -> Trace:
    with trained() as (pager, model, optimizer):
        return record(pager, model, optimizer)


def index_of(trace: Trace, name: str) -> int:
    assert trace.tensor_names.count(name) == 1, f"{name}: {trace.tensor_names}"
    return trace.tensor_names.index(name)


def uses_of(trace: Trace, name: str) -> list[tuple[str, str]]:
    """(op name, access) of each use of a tensor, in order."""
    mine = trace.access_tensor == index_of(trace, name)
    ops, modes = trace.access_op[mine].tolist(), trace.access_mode[mine].tolist()
    return [(trace.op_names[op], ACCESS_NAMES[mode]) for op, mode in zip(ops, modes)]


# -- the trace of a training iteration -----------------------------------------------------------
def test_a_recorded_trace_survives_its_file(trace: Trace, tmp_path: Path) -> None:
    """Writing runs all checks of a trace file; reading gives the same trace."""
    written = write_trace(tmp_path / "a.parquet", trace)
    read = read_trace(tmp_path / "a.parquet")
    assert read.sha256 == written.sha256
    for name in ("op_names", "tensor_names", "tensor_kinds", "page_size", "source", "device"):
        assert getattr(read, name) == getattr(trace, name), name
    for name in (
        *("op_start_us", "op_duration_us", "tensor_ids", "tensor_bytes", "tensor_persistent"),
        *("access_op", "access_tensor", "access_mode", "access_first_page", "access_page_count"),
    ):
        np.testing.assert_array_equal(getattr(read, name), getattr(trace, name), err_msg=name)
    assert read.page_size == PAGE_BYTES
    assert (read.source, read.device) == ("tensorpager", "cpu")
    assert read.metadata["models"] == ["Sequential"]
    assert read.metadata["torch"] == torch.__version__


def test_durations_are_the_iteration_without_its_stalls(one_thread: None) -> None:
    with trained() as (pager, model, optimizer), pager.iteration():
        stalls, outside = pager.stats()["stall_us"], time.perf_counter()
        with recorded(pager) as found:
            inside = time.perf_counter()
            loss_of(model).backward()
            optimizer.step()
            inside = time.perf_counter() - inside
        outside = time.perf_counter() - outside
        stalls = pager.stats()["stall_us"] - stalls
        optimizer.zero_grad()
    trace = found[0]
    waited = trace.metadata["stall_us"]
    assert 0 < waited <= stalls  # what moved no page is no waiting for one
    assert inside * 1e6 <= trace.ideal_us + waited <= outside * 1e6
    assert (trace.op_duration_us >= 0).all()
    ends = trace.op_start_us + trace.op_duration_us
    np.testing.assert_allclose(trace.op_start_us[1:], ends[:-1])
    assert trace.op_start_us[0] == 0


def test_parameters_are_read_in_both_passes_and_written_in_the_step(trace: Trace) -> None:
    uses = uses_of(trace, "2.weight")
    reads = [op for op, access in uses if access == "read"]
    writes = [op for op, access in uses if access != "read"]
    assert reads[:2] == ["aten::addmm", "aten::mm"]
    assert writes
    assert set(writes) <= set(STEP_OPS)
    first_write = next(i for i, (_, access) in enumerate(uses) if access != "read")
    assert "aten::mm" not in [op for op, _ in uses[first_write:]]
    place = index_of(trace, "2.weight")
    assert trace.tensor_kinds[place] == "parameter"
    assert trace.tensor_persistent[place]
    assert trace.tensor_bytes[place] == 256 * 256 * 4


def test_activations_are_born_in_the_forward_and_die_in_the_backward_pass(trace: Trace) -> None:
    """What GELU saves, as one example: [64, 256] of float32."""
    assert uses_of(trace, "3:saved.0") == [
        ("tensorpager::pack", "write"),
        ("aten::gelu_backward", "read"),
    ]
    saved = [i for i, kind in enumerate(trace.tensor_kinds) if kind == "activation"]
    assert len(saved) >= 6
    loss = trace.op_names.index("aten::nll_loss_forward")
    step = trace.op_names.index("aten::addcdiv_")
    for tensor in saved:
        assert not trace.tensor_persistent[tensor]
        assert trace.first_op[tensor] < loss < trace.last_op[tensor] < step
        assert trace.tensor_bytes[tensor] <= 64 * 256 * 4


def test_gradients_and_states_are_named_after_their_parameters(trace: Trace) -> None:
    uses = uses_of(trace, "2.weight.grad")
    assert uses[0] == ("tensorpager::page_gradient", "write")
    assert ("aten::lerp_", "read") in uses
    grad = index_of(trace, "2.weight.grad")
    assert trace.tensor_kinds[grad] == "gradient"
    assert not trace.tensor_persistent[grad]
    for name in ("2.weight.exp_avg", "2.weight.exp_avg_sq"):
        state = index_of(trace, name)
        assert trace.tensor_kinds[state] == "optimizer"
        assert trace.tensor_persistent[state]
        assert "readwrite" in [access for _, access in uses_of(trace, name)]


def test_small_tensors_share_a_page_under_one_name_with_all_members_listed(trace: Trace) -> None:
    small = [name for name in trace.tensor_names if name and name.startswith("0.bias +")]
    assert small == ["0.bias +4 more"]
    tensor = trace.tensor_ids[index_of(trace, small[0])]
    members = trace.metadata["shared"][str(tensor)]
    assert sorted(members) == ["0.bias", "2.bias", "4.bias", "6.bias", "6.weight"]
    assert trace.tensor_bytes[index_of(trace, small[0])] == PAGE_BYTES
    grads = [m for m in trace.metadata["shared"].values() if m[0].endswith(".grad")]
    assert grads == [["6.weight.grad"]]  # those of the biases are dense: too small for pages


def test_dense_ops_are_recorded_too(trace: Trace) -> None:
    paged = {"parameter", "gradient", "optimizer", "activation"}
    kinds = np.array(trace.tensor_kinds)[trace.access_tensor]
    touched = set(trace.access_op[np.isin(kinds, list(paged))].tolist())
    dense = {name for op, name in enumerate(trace.op_names) if op not in touched}
    assert {"aten::randn", "aten::nll_loss_forward", "aten::div"} <= dense


def test_the_live_bytes_hold_the_dense_ones(trace: Trace) -> None:
    """``div`` in AdamW's step makes a second dense matrix beside that of ``sqrt``."""
    names = np.array(trace.op_names)
    kinds = np.array(trace.tensor_kinds)[trace.access_tensor]
    dense = np.zeros(trace.ops, np.int64)
    rows = kinds == "workspace"
    dense[trace.access_op[rows]] = trace.tensor_bytes[trace.access_tensor[rows]]
    assert (np.bincount(trace.access_op[rows]) <= 1).all()  # the level is one tensor
    matrix = 256 * 256 * 4
    at_div = dense[names == "aten::div"]
    assert at_div.max() >= 2 * matrix
    assert at_div.max() < 6 * matrix
    live = live_pages_of(trace, PAGE_BYTES) * PAGE_BYTES
    persistent = int(trace.tensor_bytes[trace.tensor_persistent].sum())
    assert (live >= dense + persistent).all()


def test_dense_memory_stays_where_it_is(trace: Trace) -> None:
    """Every op from the first to the last one of a workspace touches it, so no plan can move it."""
    for tensor in np.flatnonzero(np.array(trace.tensor_kinds) == "workspace").tolist():
        ops = trace.access_op[trace.access_tensor == tensor]
        np.testing.assert_array_equal(ops, np.arange(ops[0], ops[-1] + 1))
        assert not trace.tensor_persistent[tensor]


@pytest.mark.parametrize("policy", ["lru", "lp"])
def test_policies_plan_a_recorded_trace(trace: Trace, policy: str, tmp_path: Path) -> None:
    """For 60 % of the peak; simulator and validator agree on the plan, or ``checked`` raises."""
    written = write_trace(tmp_path / "a.parquet", trace)
    peak = int(live_pages_of(written, PAGE_BYTES).max())
    frames = max(peak * 6 // 10, int(working_set_pages(written, PAGE_BYTES).max()))
    assert frames < peak
    hardware = Hardware(
        device_bytes=frames * PAGE_BYTES,
        host_bytes=1 << 30,
        disk_bytes=0,
        d2h_bytes_per_s=4e9,
        h2d_bytes_per_s=4e9,
        disk_read_bytes_per_s=1e9,
        disk_write_bytes_per_s=1e9,
        transfer_latency_us=5,
        page_size=PAGE_BYTES,
    )
    plan = checked(written, hardware, make_plan(policy, written, hardware, quick=True))
    assert plan.moves
    assert plan.predicted is not None
    assert plan.predicted.peak_device_bytes <= hardware.device_bytes


# -- other ways to train -------------------------------------------------------------------------
def test_module_paths_of_nested_modules_and_of_one_called_twice(one_thread: None) -> None:
    with trained(Nested) as (pager, model, optimizer):
        names = set(record(pager, model, optimizer).tensor_names)
        assert {"layers.1.mix:saved.0", "layers.1.mix:saved.1"} <= names
        assert {"layers.0:saved.0", "layers.0.mix.weight", "layers.0.mix.weight.grad"} <= names
        assert "Nested:saved.0" in names  # the sigmoid, in no module but the model itself
        assert not nn.modules.module._global_forward_pre_hooks
        assert not nn.modules.module._global_forward_hooks


def test_two_models_are_told_apart(one_thread: None) -> None:
    with trained() as (pager, model, _):
        other = pager.page_module(mlp())
        with recorded(pager) as found, pager.iteration():
            (loss_of(model) + loss_of(other)).backward()
        names = found[0].tensor_names
        assert {"Sequential[0].2.weight", "Sequential[1].2.weight"} <= set(names)
        assert {"Sequential[0].2.weight.grad", "Sequential[1].2.weight.grad"} <= set(names)


def test_gradients_kept_over_iterations_are_persistent(one_thread: None) -> None:
    with trained() as (pager, model, _):
        loss_of(model).backward()
        with recorded(pager) as found, pager.iteration():
            loss_of(model).backward()
        trace = found[0]
        assert trace.tensor_persistent[index_of(trace, "2.weight.grad")]
        assert set(uses_of(trace, "2.weight.grad")) == {("aten::add_", "readwrite")}


class _Replacing(torch.optim.Optimizer):
    """Makes its state anew in every step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    before = state.get("mean", torch.zeros(()))
                    state["mean"] = before * 0.9 + p.grad
                    p.sub_(state["mean"], alpha=group["lr"])


def test_states_made_anew_in_every_step_are_one_tensor(one_thread: None) -> None:
    with trained(kind=_Replacing) as (pager, model, optimizer):
        trace = record(pager, model, optimizer)
        state = index_of(trace, "2.weight.mean")
        assert trace.tensor_persistent[state]
        assert uses_of(trace, "2.weight.mean")[0] == ("aten::mul", "read")
        assert ("tensorpager::page_state", "readwrite") in uses_of(trace, "2.weight.mean")


def made_in_the_recorded_iteration() -> Trace:
    with make_pager(policy="lru") as pager:
        model = pager.page_module(mlp())
        optimizer = pager.optimizer(torch.optim.AdamW(model.parameters()))
        with pager.iteration(), recorded(pager) as found:  # the metered one
            loss_of(model).backward()
            optimizer.step()
        trace = found[0]
        state = index_of(trace, "2.weight.exp_avg")
        assert trace.tensor_persistent[state]
        first = trace.access_mode[trace.access_tensor == state][0]
        assert first & WRITE
        return trace


def test_states_made_in_the_recorded_iteration_live_on(one_thread: None) -> None:
    made_in_the_recorded_iteration()


def test_the_profiler_is_left_to_the_meter(one_thread: None, no_allocator: None) -> None:
    assert made_in_the_recorded_iteration().metadata["dense_from"] == "samples"


def test_what_is_pinned_is_used_by_the_ops_on_its_view(one_thread: None) -> None:
    with make_pager(policy="lru") as pager:
        one = pager.page(torch.ones(256, 256))
        two = pager.page(torch.ones(256, 256))
        with recorded(pager) as found:
            with one.pin() as dense:
                dense.mul_(2)
            with two.pin():
                pass
            copy = one.to_dense()
        trace = found[0]
        assert float(copy[0, 0]) == 2
    inputs = [
        (trace.op_names[op], int(tensor), ACCESS_NAMES[mode])
        for op, tensor, mode in zip(trace.access_op, trace.access_tensor, trace.access_mode)
        if trace.tensor_kinds[tensor] == "input"
    ]
    a, b = inputs[0][1], inputs[1][1]
    assert inputs == [
        ("aten::mul_", a, "readwrite"),
        ("tensorpager::pin", b, "readwrite"),
        ("aten::copy_", a, "read"),
    ]


def test_a_step_on_plain_views_is_recorded_op_by_op(one_thread: None) -> None:
    """Where everything fits the optimizer holds all pages at once and works on plain views."""
    with trained(fits=True) as (pager, model, optimizer):
        assert pager.core.fits
        trace = record(pager, model, optimizer)
        uses = uses_of(trace, "2.weight")
        assert uses[0] == ("aten::addmm", "read")
        assert [op for op, access in uses if access == "readwrite"] == [
            "aten::mul_",
            "aten::addcdiv_",
        ]


def test_iterations_with_larger_shapes_are_metered_all_the_same(
    one_thread: None, no_allocator: None
) -> None:
    with trained() as (pager, model, optimizer):
        with recorded(pager) as found, pager.iteration():
            loss_of(model, 96).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert found[0].metadata["dense_from"] == "samples"
        assert pager.core.budget.settled
        check_invariants(pager.core)
        iterate(pager, model, optimizer)


# -- recording changes nothing -------------------------------------------------------------------
@pytest.mark.parametrize("fits", [False, True])
def test_losses_and_parameters_are_the_same_bits(one_thread: None, fits: bool) -> None:
    def run(watched: bool) -> Any:
        torch.manual_seed(3)
        with make_pager(fits=fits, policy="lru") as pager:
            world = World(pager)
            model = world.module(Nested())
            optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
            losses = train(world, model, optimizer, 2)
            for _ in range(3):
                with recorded(pager) if watched else nullcontext():
                    losses += train(world, model, optimizer, 1)
            return losses, plain(model), plain(optimizer)

    assert_same(list(run(True)), list(run(False)))


def test_nothing_is_left_behind(one_thread: None) -> None:
    with trained() as (pager, model, optimizer):
        before = {p: len(p._post_accumulate_grad_hooks) for p in model.parameters()}
        mine, backend = set(vars(pager.core)), set(vars(pager.core.backend))
        for _ in range(2):
            fails = pytest.raises(KeyError, match="enough")
            with fails, recorded(pager), pager.iteration():
                loss_of(model).backward()
                raise KeyError("enough")
            assert pager.core.watch is None
            assert set(vars(pager.core)) == mine
            assert set(vars(pager.core.backend)) == backend
            assert torch._C._len_torch_dispatch_stack() == 0
            assert before == {p: len(p._post_accumulate_grad_hooks) for p in model.parameters()}
        optimizer.zero_grad()
        assert record(pager, model, optimizer).ops > 50


def test_a_failed_pin_is_no_use(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An access that raises never ends; those around it still do."""

    def fail(*_: Any, **__: Any) -> None:
        raise tp.TierFull("no room")

    with make_pager(policy="lru") as pager:
        tensors = [pager.page(torch.ones(256, 256)) for _ in range(6)]  # the first one had to leave
        with recorded(pager) as found:
            with tensors[5].pin() as dense:
                with monkeypatch.context() as patch:
                    patch.setattr(pager.core.residency, "bring", fail)
                    with pytest.raises(tp.TierFull):
                        tensors[0].pin().__enter__()
                dense.neg_()
            torch.ones(3).exp()
        trace = found[0]
    inputs = np.array(trace.tensor_kinds)[trace.access_tensor] == "input"
    assert [trace.op_names[op] for op in trace.access_op[inputs]] == ["aten::neg_"]
    assert trace.op_names[-1] == "aten::exp"


def test_one_recording_at_a_time(one_thread: None, tmp_path: Path) -> None:
    with make_pager(policy="lru") as pager:
        with recorded(pager) as found:
            with pytest.raises(tp.PagerError, match="already"), pager.record(tmp_path / "a"):
                pass
            torch.ones(3).exp()
        assert found[0].op_names[-1] == "aten::exp"
        assert list(tmp_path.iterdir()) == []


def test_iterations_are_logged_for_plans_while_ops_are_recorded(one_thread: None) -> None:
    """One recorder has both logs. (Recorded ops are dispatched one by one, in another order, so
    these are another kind of iterations.)"""
    torch.manual_seed(1)
    with make_pager(policy="lp") as pager:
        follower = pager.core.follower
        follower.most_plans = 0
        world = World(pager)
        model = world.module(mlp())
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
        train(world, model, optimizer, 3)
        usual = follower.current
        for _ in range(2):
            trace = record(pager, model, optimizer)
        watched = follower.current
        assert (usual.seen, watched.seen) == (2, 2)
        assert len(watched.keys) == len(usual.keys)
        assert trace.op_names.count("aten::addcdiv_") == 4 * 2
        assert pager.core.watch is None
        train(world, model, optimizer, 1)
        assert follower.current is usual


# -- files ---------------------------------------------------------------------------------------
def test_the_first_whole_iteration_of_the_block_is_written(
    one_thread: None, tmp_path: Path
) -> None:
    path = tmp_path / "a.parquet"
    with trained() as (pager, model, optimizer):
        with pager.record(path):
            torch.zeros(5).cumprod(0)  # before the iteration, so not in it
            with pytest.raises(KeyError), pager.iteration():
                raise KeyError
            iterate(pager, model, optimizer)
            with pager.iteration():
                torch.zeros(5).cummax(0)
            assert not path.exists()
        names = read_trace(path).op_names
        assert "aten::addcdiv_" in names
        assert not {"aten::cumprod", "aten::cummax"} & set(names)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert [p.name for p in tmp_path.iterdir()] == ["a.parquet"]
        assert pager.core.on_iteration == []


def test_a_block_without_iteration_is_one(one_thread: None, tmp_path: Path) -> None:
    with trained() as (pager, model, _):
        with pager.record(tmp_path / "a.parquet"):
            loss_of(model).backward()
        assert "aten::mm" in read_trace(tmp_path / "a.parquet").op_names
        with pager.iteration(), pager.record(tmp_path / "b.parquet"):
            loss_of(model)
        assert "aten::addmm" in read_trace(tmp_path / "b.parquet").op_names


def test_nothing_is_written_if_no_iteration_is_completed(one_thread: None, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    nowhere = tmp_path / "none" / "a.parquet"
    failed, refused = pytest.raises(KeyError), pytest.raises(tp.PagerError, match="none was compl")
    with trained() as (pager, _, _):
        with refused, pager.record(path), failed, pager.iteration():
            raise KeyError
        with pytest.raises(KeyError), pager.record(path), pager.iteration():
            raise KeyError
        with pytest.raises(tp.PagerError, match="nothing ran"), pager.record(path):
            pass
        with (
            pytest.raises(tp.PagerError, match="no folder"),
            pager.record(nowhere),
        ):
            pass
        assert list(tmp_path.iterdir()) == []
        assert pager.core.on_iteration == []
        assert pager.core.watch is None
