"""Iterations of fake tensors: as those that are recorded, and needing no memory."""

from __future__ import annotations

import json
import re
import resource
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from tensorpager.pager.cli import main
from tensorpager.pager.devices.dense_allocator import Account, DenseAllocator
from tensorpager.pager.errors import PagerError
from tensorpager.pager.plan.estimate import (
    NOTHING_INSIDE,
    WORKSPACES,
    Iteration,
    fake,
    fake_iteration,
    training_of_function,
    training_of_hf,
)
from tensorpager.pager.plan.plain_script import Watch
from tensorpager.pager.plan.record import Report
from tensorpager.planner.hardware import COMPUTE, PRESETS, Compute, load_compute
from tensorpager.planner.lifetimes import live_pages
from tensorpager.planner.trace import Trace
from tensorpager.planner.trace_file import read_trace

transformers = pytest.importorskip("transformers")

TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "dtype": "bfloat16",
}  # fmt: skip
COMPUTER = Compute(1e12, 0.5e12, 1e10, 1.0, 1.0)
MODULE = """
import torch

def model():
    with torch.device("meta"):
        made = torch.nn.Sequential(
            torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256)
        )
    return made

def tied():
    with torch.device("meta"):
        head = torch.nn.Linear(32, 100, bias=False)
        made = torch.nn.Sequential(torch.nn.Embedding(100, 32), head)
    made[1].weight = made[0].weight
    return made

def fed():
    return torch.nn.Bilinear(8, 8, 4), (torch.zeros(3, 8), torch.zeros(3, 8, device="meta"))

def number():
    return 7

def broken():
    raise ValueError("no such\\nthing")

class Peek(torch.nn.Module):
    def __init__(self, what):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.what = what
    def forward(self, x):
        return x if self.what(x) else self.layer(x)

def by_value():
    return Peek(lambda x: x.sum().item() > 0)

def by_truth():
    rarely, never = (lambda x: torch.rand([]) < 0.1), (lambda x: x.isnan().any())
    return torch.nn.Sequential(Peek(rarely), Peek(never))
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "module.py"
    path.write_text(MODULE)
    return path


def llama(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(transformers.LlamaConfig(**changes).to_json_string())
    return path


def of_function(target: str, batch: int = 4, seq: int | None = None, **how: Any) -> Iteration:
    with fake():
        training = training_of_function(target, batch, seq, None)
        return fake_iteration(training, "adamw", COMPUTER, 1e9, **how)


def bytes_of_kinds(trace: Trace) -> Counter[str]:
    found: Counter[str] = Counter()
    for kind, nbytes in zip(trace.tensor_kinds, trace.tensor_bytes.tolist()):
        found[kind] += nbytes
    return found


# -- against a recording ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("family", "optimizer", "batches"),
    [
        ("Llama", "adamw", 1),
        ("Llama", "sgd-momentum", 1),
        ("Mixtral", "adamw", 1),
        ("Llama", "adamw", 3),
    ],
)
def test_as_the_same_training_recorded(
    tmp_path: Path, family: str, optimizer: str, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Pagers of other tests may still be there.
    monkeypatch.setattr("tensorpager.pager.plan.plain_script._pages", lambda: False)
    described = getattr(transformers, f"{family}Config")(**TINY)
    config = tmp_path / "config.json"
    config.write_text(described.to_json_string())
    with fake():
        training = training_of_hf(config, 2, 64, None)
        estimated = fake_iteration(training, optimizer, COMPUTER, 1e9, batches=batches).trace
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(described).train()
    made: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    if optimizer != "adamw":
        made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    Watch(Report(tmp_path / "recorded.parquet", 3, None))
    tokens = torch.randint(0, TINY["vocab_size"], (2, 64))
    for _ in range(4):
        for _ in range(batches):
            loss = model(input_ids=tokens, labels=tokens).loss
            (loss / batches if batches > 1 else loss).backward()
        made.step()
        made.zero_grad()
    recorded = read_trace(tmp_path / "recorded.parquet")
    assert estimated.op_names == recorded.op_names
    assert estimated.op_rerun.tolist() == recorded.op_rerun.tolist()
    assert estimated.segments == recorded.segments
    assert [s.name for s in estimated.segments] == batches * ["model.layers.0", "model.layers.1"]
    assert (estimated.device, recorded.device) == ("estimated", "cpu")
    assert estimated.tensor_names == recorded.tensor_names
    ours, theirs = bytes_of_kinds(estimated), bytes_of_kinds(recorded)
    assert ours.keys() == theirs.keys()
    for kind, nbytes in ours.items():
        assert nbytes == pytest.approx(theirs[kind], rel=0.05), kind
    peaks = [live_pages(trace, 1).max() for trace in (estimated, recorded)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.1)


def test_updates_in_the_backward_pass_come_right_after_the_gradient(module: Path) -> None:
    late, early = (of_function(f"{module}:model", overlap=how).trace for how in (False, True))
    updates = [op for op, name in enumerate(early.op_names) if name.startswith("update.")]
    assert [early.op_names[op] for op in updates][-1] == "update.0.weight"
    assert sorted(early.op_names[op] for op in updates) == sorted(
        name for name in late.op_names if name.startswith("update.")
    )
    assert updates != list(range(updates[0], early.ops))  # other ops between them
    assert not np.isnan(early.op_host_us[updates]).any()
    assert live_pages(early, 1).max() <= live_pages(late, 1).max()


def test_clipping_reads_all_gradients_before_the_first_update(module: Path) -> None:
    plain, clipped = (of_function(f"{module}:model", clip=how).trace for how in (False, True))
    first = next(op for op, name in enumerate(clipped.op_names) if name.startswith("update."))
    norms = [op for op, name in enumerate(clipped.op_names) if "norm" in name]
    assert not [name for name in plain.op_names if "norm" in name]
    assert len(norms) >= 4
    assert max(norms) < first
    with pytest.raises(PagerError, match="overlap, or clip"):
        of_function(f"{module}:model", overlap=True, clip=True)


def test_an_update_is_one_op_that_the_host_can_take(module: Path) -> None:
    trace = of_function(f"{module}:model").trace
    updates = [name for name in trace.op_names if name.startswith("update.")]
    assert updates == ["update.0.weight", "update.0.bias", "update.2.weight", "update.2.bias"]
    op = trace.op_names.index("update.0.weight")
    rows = trace.access_op == op
    names = {
        trace.tensor_names[t]: m for t, m in zip(trace.access_tensor[rows], trace.access_mode[rows])
    }
    assert names == {
        "0.weight": 3, "0.weight.grad": 1, "0.weight.exp_avg": 3, "0.weight.exp_avg_sq": 3,
    }  # fmt: skip
    assert trace.op_host_us[op] == pytest.approx(28 * 256 * 512 / 1e9 * 1e6)
    assert not trace.op_rerun[op]
    assert np.isnan(trace.op_host_us[trace.op_names.index("aten::addmm")])


def test_times_are_a_roofline(module: Path) -> None:
    found = of_function(f"{module}:model", batch=1024)
    trace = found.trace
    first = trace.op_names.index("aten::addmm")
    assert trace.op_duration_us[first] == pytest.approx(2 * 1024 * 256 * 512 / 0.5e12 * 1e6)
    relu = trace.op_names.index("aten::relu")
    assert trace.op_duration_us[relu] == pytest.approx(2 * 4 * 1024 * 512 / 1e10 * 1e6)
    assert trace.op_duration_us[trace.op_names.index("aten::t")] == 0
    assert found.flops == 2 * 1024 * 256 * 512 * 5  # all products but that for the input's gradient


def test_eight_billion_parameters_take_no_memory(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with fake():
        training = training_of_hf(llama(tmp_path, **LLAMA_8B), 1, 4096, None)
        found = fake_iteration(training, "adamw", COMPUTE["rtx4090"], 50e9)
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert taken < 1 << 20  # KiB
    kinds = bytes_of_kinds(found.trace)
    assert kinds["parameter"] == 2 * 8_030_261_248
    assert kinds["gradient"] == kinds["parameter"]
    assert kinds["optimizer"] == 2 * kinds["parameter"]
    tokens = 4096
    attention = 32 * 12 * tokens * tokens * 4096  # not halved for the causal mask
    assert found.flops == pytest.approx(6 * 7.5e9 * tokens + attention, rel=0.1)
    assert found.unknown == {}
    backward = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
    op = found.trace.op_names.index(backward)  # in 16 bits, though its sums are in 32
    flops = 10 * tokens * tokens * 4096
    assert found.trace.op_duration_us[op] == pytest.approx(flops / (0.55 * 165.2e12) * 1e6)


@pytest.mark.slow  # 40 s of the processor
def test_eight_billion_parameters_on_a_card(tmp_path: Path) -> None:
    config = llama(tmp_path, **LLAMA_8B)
    words = ["estimate", "--hf", str(config), "--seq", "4096", "--hardware", "rtx4090", "--json"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert len(answer["speeds"]) == 5
    assert all(50 < speed["percent_of_ideal"] < 110 for speed in answer["speeds"][:4])
    assert answer["best_choice"] == "moves, host steps"


FEW = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (
            {"model_type": "t5", "d_model": 32, "num_layers": 1, "decoder_start_token_id": 0},
            "T5ForConditionalGeneration",
        ),
        ({**FEW, "model_type": "bert", "architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        ({**FEW, "model_type": "distilbert"}, "DistilBertForMaskedLM"),
        ({"model_type": "xlnet", "d_model": 32, "n_layer": 1, "n_head": 2}, "XLNetLMHeadModel"),
        (
            {**FEW, "model_type": "mistral", "architectures": ["MistralForTokenClassification"]},
            "MistralForTokenClassification",
        ),
        ({**FEW, "model_type": "llama", "architectures": ["OfMyOwn"]}, "LlamaForCausalLM"),
        # Not finite, as transformers writes it.
        (
            {
                **FEW, "model_type": "mamba2", "num_heads": 4, "head_dim": 16, "n_groups": 1,
                "state_size": 8, "time_step_limit": [0.0, {"__float__": "Infinity"}],
            },
            "Mamba2ForCausalLM",
        ),
        # Its first weights depend on values.
        (
            {**FEW, "model_type": "modernbert-decoder", "pad_token_id": 0},
            "ModernBertDecoderForCausalLM",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_models_of_tokens(tmp_path: Path, config: dict[str, Any], name: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with fake():
        training = training_of_hf(path, 2, 16, None)
        found = fake_iteration(training, "sgd", COMPUTER, 1e9)
    assert type(training.module).__name__ == name
    assert training.tokens == 32
    assert found.flops > 0
    assert found.trace.has_choices


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_are_computed_too(tmp_path: Path, dtype: str) -> None:
    config = transformers.MixtralConfig(**FEW, num_local_experts=4, num_experts_per_tok=2)
    path = tmp_path / "config.json"
    path.write_text(config.to_json_string())
    no_memory = replace(COMPUTER, memory_bytes_per_s=1e30)  # takes any time, so computing does
    with fake():
        found = fake_iteration(training_of_hf(path, 2, 16, dtype), "sgd", no_memory, 1e9)
    names, times = found.trace.op_names, found.trace.op_duration_us
    ops = [op for op, name in enumerate(names) if name == "aten::_grouped_mm"]
    # Of gates and values together, and of what they give; then two products for each of these.
    widths = [2 * 64 * 32, 32 * 64]
    flops = [2 * 2 * 32 * width for width in widths + 2 * widths[:1] + 2 * widths[1:]]
    rate = 0.5e12 if dtype == "float32" else 1e12
    assert sum(times[op] for op in ops) == pytest.approx(1e6 * sum(flops) / rate)
    assert found.flops > sum(flops)


# -- models by functions -----------------------------------------------------------------------
def test_what_is_shared_stays_shared(module: Path) -> None:
    trace = of_function(f"{module}:tied", seq=5).trace
    assert trace.tensor_kinds.count("parameter") == 1
    assert "aten::nll_loss_forward" in trace.op_names  # cross entropy of the tokens


def test_inputs_of_the_function(module: Path) -> None:
    assert "aten::_trilinear" in of_function(f"{module}:fed").trace.op_names


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("number", "returned int"),
        ("broken", "failed: ValueError: no such thing"),
        ("by_value", "cannot be run with tensors that have no values"),
        ("nothing", "has no function nothing"),
    ],
)
def test_functions_that_are_no_model(module: Path, what: str, says: str) -> None:
    with pytest.raises(PagerError, match=says) as caught:
        of_function(f"{module}:{what}")
    assert "\n" not in str(caught.value)


def test_what_a_recurrent_layer_keeps_counts(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "import torch\n"
        "def make():\n"
        "    return torch.nn.LSTM(64, 128, 2, batch_first=True), torch.zeros(8, 32, 64)\n"
    )
    found = of_function(f"{path}:make")
    sizes = [
        n for n, at in zip(found.trace.tensor_bytes, found.trace.tensor_kinds) if at != "workspace"
    ]
    layers = [torch.nn.LSTM(width, 128) for width in (64, 128)]
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for layer in layers:
            layer(torch.zeros(32, 8, layer.input_size, requires_grad=True))
    for nbytes in sorted(kept)[-2:]:
        assert min(abs(size / nbytes - 1) for size in sizes) < 0.2
    cells = sum(4 * 128 * (layer.input_size + 128) for layer in layers)
    assert found.flops == 6 * 8 * 32 * cells


def test_what_a_model_asks_of_values_is_false(module: Path) -> None:
    found = of_function(f"{module}:by_truth")
    assert found.taken_false == {"0": 1, "1": 1}
    assert found.trace.op_names.count("aten::addmm") == 2
    words = ["estimate", f"{module}:by_truth", "--hardware", "cpu", "--no-speeds"]
    printed = CliRunner().invoke(main, words).stdout
    assert "as if what they ask were false: 0, 1" in " ".join(printed.split())


# -- what ops allocate inside ------------------------------------------------------------------
def test_workspaces_are_what_ops_allocate(allocator: DenseAllocator) -> None:
    aten = torch.ops.aten
    account = Account(allocator)

    def inside(op: Any, *operands: Any) -> float:
        """Bytes at the peak beyond the results, as a share of the operands'."""
        op(*operands)
        account.reset()
        result = op(*operands)
        nbytes = sum(t.numel() * t.itemsize for t in operands if isinstance(t, torch.Tensor))
        share = (account.peak - account.current) / nbytes
        del result
        return share

    try:
        for column, dtype in enumerate((torch.float32, torch.bfloat16)):
            x, y = torch.randn(2, 1024, 1024).to(dtype)
            some, last = torch.arange(0, 1024, 4), torch.zeros(1024, 1, dtype=torch.int64)
            ends = torch.tensor([100, 1024], dtype=torch.int32)
            cases = {
                "logsumexp": (aten.logsumexp, x, [1]),
                "native_dropout": (aten.native_dropout, x, 0.1, True),
                "mean": (aten.mean, x, [1], True),
                "mse_loss": (aten.mse_loss, x, y),
                "_softmax": (aten._softmax, x, 1, False),
                "_log_softmax": (aten._log_softmax, x, 1, False),
                "sum": (aten.sum, x, [0], True),
                "cat": (lambda a, b: aten.cat([a, b]), x, y),
                "_safe_softmax": (aten._safe_softmax, x, 1),
                "softplus_backward": (aten.softplus_backward, x, y, 1.0, 20.0),
                "bernoulli_": (aten.bernoulli_, x.clone(), 0.5),
                "masked_fill": (aten.masked_fill, x, x > 0, 0.0),
                "triu": (aten.triu, x),
                "flip": (aten.flip, x, [0]),
                "roll": (aten.roll, x, [1], [0]),
                "index_put": (lambda a, i, b: aten.index_put(a, [i], b), x, some, y[:256]),
                "index_add": (aten.index_add, x, 0, some, y[:256]),
                "scatter": (aten.scatter, x, 1, last, 1.0),
                "scatter_add": (aten.scatter_add, x, 1, last, y[:, :1]),
                "_grouped_mm": (aten._grouped_mm, x, y, ends),
                "native_group_norm": (aten.native_group_norm, x, None, None, 4, 256, 1024, 8, 1e-5),
                "avg_pool2d": (aten.avg_pool2d, x.view(1, 1, 1024, 1024), [2, 2]),
            }
            for name, (op, *operands) in cases.items():
                assert (name in WORKSPACES) != (name in NOTHING_INSIDE)
                share = WORKSPACES.get(name, (0.0, 0.0))[column]
                assert inside(op, *operands) == pytest.approx(share, abs=0.1), (name, dtype)
    finally:
        account.close()


def test_what_is_inside_is_in_the_trace_and_what_is_not_known_is_named(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "import torch\n"
        "class Odd(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(64, 64)\n"
        "    def forward(self, x):\n"
        "        y = self.layer(x)\n"
        "        return torch.logsumexp(y, 1) + torch.linalg.svdvals(y).sum()\n"
        "make = Odd\n"
    )
    found = of_function(f"{path}:make", batch=64)
    assert "aten::_linalg_svd" in found.unknown
    kinds = bytes_of_kinds(found.trace)
    assert kinds["workspace"] == 64 * 64 * 4


# -- the command ---------------------------------------------------------------------------------
def test_the_answer(module: Path, tmp_path: Path) -> None:
    out, page = tmp_path / "trace.parquet", tmp_path / "page.html"
    words = ["estimate", f"{module}:model", "--batch", "512", "--hardware", "cpu"]
    words += ["--dtype", "bf16", "--device-bytes", "60%", "--out", str(out), "--html", str(page)]
    result = CliRunner().invoke(main, [*words, "--json"])
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    weights = 2 * (256 * 512 + 512 + 512 * 256 + 256)
    assert answer["need_bytes"]["parameter"] == weights
    assert answer["need_bytes"]["optimizer"] == 2 * weights
    assert answer["smallest_device_bytes"] < answer["peak_bytes"]
    assert not answer["fits"]
    sizes = [speed["device_bytes"] for speed in answer["speeds"]]
    assert sizes[:4] == sorted(sizes[:4], reverse=True)
    assert sizes[3] == answer["smallest_device_bytes"]
    assert len(sizes) == 5
    assert answer["speeds"][4]["host_bytes"] < answer["speeds"][0]["host_bytes"]
    assert set(answer["pager"]) == {"device_budget", "host_budget", "disk_budget"}
    trace = read_trace(out)
    assert trace.ops == answer["ops"]
    assert trace.has_choices
    assert "tp.Pager(" in page.read_text()
    assert not re.search("https?://", page.read_text())
    assert "prefers-color-scheme: dark" in page.read_text()
    assert page.read_text().count("<section>") == 4  # three tables and the line of Python
    printed = CliRunner().invoke(main, words)
    assert "best single choice:" in printed.stdout
    assert "open it in a browser" in " ".join(printed.stdout.split())
    assert max(map(len, printed.stdout.splitlines())) <= 80


@pytest.mark.parametrize("batches", [2, 3, 6])
def test_batches_that_are_added_up(module: Path, tmp_path: Path, batches: int) -> None:
    """Three of them are recorded. The trace is that of all."""
    out = tmp_path / "trace.parquet"
    words = ["estimate", f"{module}:model", "--batch", "64", "--hardware", "cpu", "--json"]
    words += ["--device-bytes", "60%"]
    once = json.loads(CliRunner().invoke(main, words).stdout)
    words += ["--accumulate", str(batches), "--out", str(out)]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    trace = read_trace(out)
    whole = of_function(f"{module}:model", 64, batches=batches)
    assert trace.op_names == whole.trace.op_names
    for column in ("op", "tensor", "mode", "first_page", "page_count"):
        ours, theirs = (getattr(each, f"access_{column}") for each in (trace, whole.trace))
        assert (ours == theirs).all()
    assert (trace.tensor_bytes == whole.trace.tensor_bytes).all()
    assert trace.segments == whole.trace.segments
    assert answer["ops"] == trace.ops
    assert answer["flops"] == whole.flops
    assert answer["samples"] == batches * once["samples"]
    assert answer["ideal_us"] == pytest.approx(trace.ideal_us)
    assert answer["ideal_us"] < batches * once["ideal_us"], "there is one update"
    assert answer["peak_bytes"] == live_pages(trace, trace.page_size).max() * trace.page_size
    speeds = [speed["iteration_us"] for speed in answer["speeds"]]
    assert speeds[0] >= answer["ideal_us"] * 0.99 - sum(trace.op_duration_us[-4:])
    assert all(more >= 0.9999 * less for less, more in pairwise(speeds[:4]))


def test_one_of_several_ranks(module: Path) -> None:
    """It holds its part, gathers one layer after another, and waits for a slow network."""
    words = ["estimate", f"{module}:model", "--batch", "512", "--hardware", "cpu", "--json"]
    one, four, slow = (
        json.loads(CliRunner().invoke(main, [*words, *more]).stdout)
        for more in ([], ["--ranks=4"], ["--ranks=4", "--nodes=2", "--network=1MB"])
    )
    for kind in ("parameter", "gradient", "optimizer"):
        assert four["need_bytes"][kind] == one["need_bytes"][kind] / 4
    assert 0 < four["need_bytes"]["activation"] <= one["need_bytes"]["activation"]
    assert four["peak_bytes"] < one["peak_bytes"]
    tokens = [answer.get("samples") or answer.get("tokens") for answer in (one, four)]
    assert tokens[1] == 4 * tokens[0]
    assert one["ideal_us"] > four["ideal_us"] > 0.5 * one["ideal_us"], "updates are a fourth"
    assert slow["ideal_us"] > 10 * four["ideal_us"]


def test_a_plan(module: Path, tmp_path: Path) -> None:
    out, plan = tmp_path / "trace.parquet", tmp_path / "plan.json"
    words = ["estimate", f"{module}:model", "--batch", "512", "--hardware", "cpu"]
    words += [
        "--dtype",
        "fp32",
        "--device-bytes",
        "60%",
        "--out",
        str(out),
        "--plan",
        str(plan),
        "--json",
    ]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.stderr
    assert json.loads(plan.read_text())["trace_sha256"] == read_trace(out).sha256
    assert json.loads(result.stdout)["plan"]["percent_of_ideal"] > 0


def test_a_device_that_is_too_small(module: Path) -> None:
    words = ["estimate", f"{module}:model", "--hardware", "cpu", "--device-bytes", "64KiB"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 1
    assert "lower --batch or --seq" in result.stderr
    assert "smallest device budget" in result.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "one of the two"),
        (["a.py:f", "--hf", "c.json"], "one of the two"),
        (["missing.py:f"], "no file missing.py"),
        (["module"], "write FILE.py:function"),
        (["--hf", "missing.json"], "cannot be read"),
        (["--hf", "list.json"], "model_type"),
        (["--hf", "text.json"], "not JSON"),
        (["--hf", "odd.json"], "transformers has no model of tokens of model_type 'no-such-model'"),
        (["--hf", "vision.json"], "transformers has no model of tokens of model_type 'vit'"),
        (["--hf", "pixels.json"], "transformers has no model of tokens of model_type 'vit'"),
        (["--hf", "wrong.json"], "transformers refuses it"),
        (["--hf", "short.json", "--seq", "64"], "more than the 32 positions"),
        (["module.py:model", "--plan", "p.json"], "--out"),
        (["module.py:model", "--hardware", "rtx9"], "no preset"),
        (["module.py:model", "--accumulate", "2", "--overlap"], "leave out one of the two"),
        (["module.py:model", "--accumulate", "2", "--ranks", "4"], "--accumulate or --ranks"),
        (["module.py:model", "--hardware", "plain.toml"], "[compute]"),
        (["module.py:model", "--hardware", "odd.toml"], "compute.flops is unknown"),
    ],
)
def test_bad_input_is_one_line(
    module: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    monkeypatch.chdir(module.parent)
    for name, text in {
        "list.json": "[]",
        "text.json": "model",
        "odd.json": '{"model_type": "no-such-model"}',
        "vision.json": '{"model_type": "vit"}',
        "pixels.json": '{"model_type": "vit", "architectures": ["ViTForImageClassification"]}',
        "wrong.json": '{"model_type": "llama", "hidden_size": "wide"}',
        "short.json": '{"model_type": "llama", "max_position_embeddings": 32}',
        "plain.toml": 'device_bytes = "1GiB"\n',
        "odd.toml": 'device_bytes = "1GiB"\n[compute]\nflops = 1\n',
    }.items():
        Path(name).write_text(text)
    hardware = [] if "--hardware" in words else ["--hardware", "cpu"]
    result = CliRunner().invoke(main, ["estimate", *words, *hardware])
    assert result.exit_code == 2, result.output
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = llama(tmp_path, **TINY)
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    result = CliRunner().invoke(main, ["estimate", "--hf", str(config), "--hardware", "cpu"])
    assert result.exit_code == 2
    assert "pip install 'tensorpager[hf]'" in result.stderr


def test_every_preset_computes(tmp_path: Path) -> None:
    assert COMPUTE.keys() == PRESETS.keys()
    path = tmp_path / "mine.toml"
    path.write_text(
        'device_bytes = "1GiB"\n[compute]\nflops_per_s = 2e12\nflops_32_per_s = 1e12\n'
        "memory_bytes_per_s = 1e11\n"
    )
    assert load_compute(path) == Compute(2e12, 1e12, 1e11)
