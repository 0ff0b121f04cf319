"""Checkpoints: written from pages, read into pages, whole or not at all."""

import json
import os
import stat
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import tensorpager as tp
from tensorpager.pager.checkpoint import snapshot as checkpoint_snapshot
from tensorpager.pager.checkpoint.save_load import load, save
from tensorpager.pager.debug.check import check_invariants
from tensorpager.pager.optim.optimizer import load_optimizer
from tensorpager.pager.tensor import tensor_bytes as checkpoint_bytes
from tensorpager.pager.tensor.tensor_bytes import chunks

from .models import PAGE_BYTES, World, assert_same, make_pager, mlp, plain, train

FEW_FRAMES = 8  # of 64 KiB; the largest weight below takes 20 pages


class Net(nn.Module):
    """Weights of all sorts: larger than an arena of few frames, tied, in another memory order, in
    half precision, of a few bytes; and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(512, 640)
        self.tied = nn.Linear(512, 640, bias=False)
        self.tied.weight = self.large.weight
        self.conv = nn.Conv2d(32, 64, 3).to(memory_format=torch.channels_last)
        self.half = nn.Linear(300, 7, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(3)
        self.scalar = nn.Parameter(torch.tensor(2.5))


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    model = Net()
    with torch.no_grad():
        for tensor in (*model.parameters(), model.norm.running_mean):
            tensor.normal_()
    return model


@pytest.fixture
def few_frames(one_thread: None) -> Iterator[tp.Pager]:
    with make_pager(frames=FEW_FRAMES) as pager:
        yield pager
        check_invariants(pager.core)


# -- files ---------------------------------------------------------------------------------------
def test_pt_file_from_pages_is_torchs_own(few_frames: tp.Pager, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    model = few_frames.page_module(net(1))
    save(few_frames.core, path, {"model": model.state_dict(), "step": 7, "more": [(1, None)]})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["model.pt"]
    with zipfile.ZipFile(path) as container:
        assert container.testzip() is None  # its check sums are those of the data
    content = torch.load(path, weights_only=True)
    assert (content["step"], content["more"]) == (7, [(1, None)])
    loaded, expected = content["model"], net(1).state_dict()
    assert_same(plain(loaded), plain(expected))
    assert loaded["large.weight"].data_ptr() == loaded["tied.weight"].data_ptr()
    assert loaded["conv.weight"].stride() == expected["conv.weight"].stride()
    assert loaded._metadata == expected._metadata
    size = sum(p.nbytes for p in net(1).parameters())
    assert size < path.stat().st_size < size + 20_000


def _by_hand(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Header and arrays of a safetensors file, by nothing but its description."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    kinds = {"F32": "<f4", "BF16": "<u2", "I64": "<i8"}
    arrays = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            array = np.frombuffer(data[begin:end], kinds[entry["dtype"]])
            arrays[name] = array.reshape(entry["shape"])
            assert begin % array.itemsize == 0
    return header, arrays


def test_safetensors_file_from_pages(few_frames: tp.Pager, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    few_frames.page_module(model := net(1))
    save(few_frames.core, path, metadata={"format": "pt", "who": "größe"})
    header, arrays = _by_hand(path)
    assert header["__metadata__"] == {"format": "pt", "who": "größe"}
    expected = net(1).state_dict()
    assert arrays.keys() == expected.keys()
    for name, array in arrays.items():
        bits = expected[name].contiguous()
        bits = bits.view(torch.int16) if bits.dtype is torch.bfloat16 else bits
        assert array.shape == tuple(bits.shape)
        assert array.tobytes() == bits.numpy().tobytes(), name
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    loaded = load(few_frames.core, path)
    assert loaded == ([], [], {"format": "pt", "who": "größe"})
    assert_same(plain(model.state_dict()), plain(expected))


def test_safetensors_library_agrees(few_frames: tp.Pager, tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch", reason="needs safetensors")
    model = few_frames.page_module(net(1))
    save(few_frames.core, tmp_path / "ours.safetensors")
    theirs = library.load_file(tmp_path / "ours.safetensors")
    expected = {name: value.contiguous() for name, value in net(1).state_dict().items()}
    assert_same(dict(theirs), plain(expected))
    expected = {name: value.clone() * 2 for name, value in expected.items()}
    library.save_file(expected, tmp_path / "theirs.safetensors", {"a": "b"})
    assert load(few_frames.core, tmp_path / "theirs.safetensors").metadata == {"a": "b"}
    assert_same(plain(dict(model.state_dict())), plain(expected))


def test_what_formats_cannot_hold_is_refused(tight_pager: tp.Pager, tmp_path: Path) -> None:
    weight = tight_pager.page(torch.randn(3))
    for name, state, error, words in (
        ("a.txt", {"a": weight}, ValueError, "take one of .pt"),
        ("a.safetensors", {"a": {"b": weight}}, TypeError, "'a' is dict"),
        ("a.safetensors", {"a": torch.randn(3, dtype=torch.complex128)}, TypeError, "of 'a'"),
        ("a.safetensors", None, ValueError, "pages 0 models"),
        ("a.pt", {"a": weight, "b": Path("x")}, TypeError, "only tensors, numbers"),
        ("a.pt", {"a": torch.eye(2).to_sparse()}, TypeError, "sparse"),
        ("none/a.pt", {"a": weight}, FileNotFoundError, "there is no folder"),
    ):
        with pytest.raises(error, match=words):
            save(tight_pager.core, tmp_path / name, state)
    with pytest.raises(ValueError, match="only safetensors"):
        save(tight_pager.core, tmp_path / "a.pt", {"a": weight}, metadata={})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_what_was_saved_may_be_resized(name: str, tight_pager: tp.Pager, tmp_path: Path) -> None:
    dense = torch.arange(5.0)
    save(tight_pager.core, tmp_path / name, {"dense": dense})
    assert dense.resize_(50).shape == (50,)


def test_views_into_pages_are_saved(few_frames: tp.Pager, tmp_path: Path) -> None:
    """Those that begin amid a page, are transposed, have gaps, or nothing at all."""
    values = torch.randn(300, 400)
    paged = few_frames.page(values)
    views = {
        "rows": lambda t: t[7:290], "t": lambda t: t.t(), "gaps": lambda t: t[:, ::2],
        "one": lambda t: t[5, 6], "none": lambda t: t[:0],
    }  # fmt: skip
    save(few_frames.core, tmp_path / "a.pt", {name: view(paged) for name, view in views.items()})
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    for name, view in views.items():
        assert torch.equal(loaded[name], view(values)), name


# -- loading -------------------------------------------------------------------------------------
@contextmanager
def _small_pager(tmp_path: Path, **options: Any) -> Iterator[tp.Pager]:
    """Most of what it pages is on disk."""
    limits = {"host_budget": 0, "disk_budget": "64MiB", "disk_path": tmp_path}
    with make_pager(frames=FEW_FRAMES, **(limits | options)) as pager:
        yield pager
        check_invariants(pager.core)


def _write_shards(folder: Path, suffix: str) -> dict[str, torch.Tensor]:
    """As transformers does it: two shards, tied weights under one name."""
    state = {name: value.contiguous() for name, value in net(3).state_dict().items()}
    del state["tied.weight"]
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    files = {name: f"{stem}-{1 + i % 2:05d}-of-00002.{suffix}" for i, name in enumerate(state)}
    with make_pager() as pager:
        for file in set(files.values()):
            part = {name: value for name, value in state.items() if files[name] == file}
            if suffix == "bin":
                torch.save(part, folder / file)
            else:
                save(pager.core, folder / file, part, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    return state


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_sharded_checkpoint_into_a_meta_model(
    suffix: str, one_thread: None, tmp_path: Path
) -> None:
    state = _write_shards(tmp_path, suffix)
    with torch.device("meta"):
        model = Net()
    with _small_pager(tmp_path) as pager:
        pager.page_module(model)
        model.norm.to_empty(device="cpu")  # its buffers
        assert load(pager.core, tmp_path)[:2] == ([], [])
        found = plain(model.state_dict())
        assert_same(plain(dict(found)), plain({**state, "tied.weight": state["large.weight"]}))
        assert pager.stats()["disk_bytes_written"] > 0
        lacking = dict(state)
        del lacking["large.weight"]
        torch.save({**lacking, "more": torch.ones(1)}, tmp_path / "part.pt")
        loaded = load(pager.core, tmp_path / "part.pt", strict=False)
        assert loaded.missing_keys == ["large.weight", "tied.weight"]
        assert loaded.unexpected_keys == ["more"]
        with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"more\""):
            load(pager.core, tmp_path / "part.pt")
        torch.save({**state, "half.weight": torch.ones(7, 299)}, tmp_path / "shape.pt")
        with pytest.raises(RuntimeError, match=r"size mismatch for half.weight.*\[7, 299\]"):
            load(pager.core, tmp_path / "shape.pt", model)
    for wrong, words in (
        ("[1]", "not an index"),
        ('{"weight_map": {"a": "../x.bin"}}', "beside it"),
        (json.dumps({"weight_map": {"a": next(tmp_path.glob("*00001*")).name}}), "lacks 'a'"),
    ):
        (tmp_path / "x.index.json").write_text(wrong)
        with make_pager() as pager, pytest.raises(tp.PagerError, match=words):
            load(pager.core, tmp_path / "x.index.json")


def test_other_dtypes_are_cast_as_torch_does(few_frames: tp.Pager, tmp_path: Path) -> None:
    model = few_frames.page_module(net(1))
    state = {name: value.double() for name, value in net(2).state_dict().items()}
    torch.save(state, tmp_path / "double.pt")
    load(few_frames.core, tmp_path / "double.pt")
    assert_same(plain(model.state_dict()), plain(net(2).state_dict()))


def test_chunks_are_small(few_frames: tp.Pager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_bytes, "BUFFER_BYTES", 2 * PAGE_BYTES)
    values = torch.randn(1 << 18)
    for tensor in (values, few_frames.page(values)):
        sizes, together = [], b""
        for chunk in chunks(tensor):
            sizes.append(len(chunk))
            together += bytes(chunk)
        assert together == values.numpy().tobytes()
        assert max(sizes) <= 2 * PAGE_BYTES


# -- state_dict ----------------------------------------------------------------------------------
@pytest.mark.parametrize("in_file", [True, False])
def test_state_dict_is_a_copy_that_outlives_its_pager(
    in_file: bool, one_thread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_file:
        monkeypatch.setattr(checkpoint_snapshot, "IN_MEMORY_BYTES", 0)
    with _small_pager(tmp_path) as pager:
        model = pager.page_module(net(1))
        state = pager.state_dict()["models"][0]
        where = Path("/proc/self/maps").read_text()
        assert (f"{tmp_path}/" in where) == in_file  # deleted, and mapped
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    assert all(type(value) is torch.Tensor for value in state.values())
    assert os.listdir(tmp_path) == []
    twin = net(2)
    twin.load_state_dict(state)
    assert_same(plain(twin.state_dict()), plain(net(1).state_dict()))
    state["scalar"].add_(1)  # they are the reader's own
    assert state["scalar"] == net(1).scalar + 1
    del state
    assert f"{tmp_path}/" not in Path("/proc/self/maps").read_text()


# -- optimizers ----------------------------------------------------------------------------------
KINDS: dict[str, dict[str, Any]] = {
    "torch's": {},
    "8bit": {"states": "8bit"},
    "bf16, masters": {"states": "bf16", "master_weights": True},
    "bf16": {"states": "bf16"},
    "8bit, masters": {"states": "8bit", "master_weights": True},
}


def _resumable(pager: tp.Pager, kind: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = mlp(depth=2)
    model[2] = model[2].to(torch.bfloat16 if kind.get("master_weights") else torch.float32)
    if kind.get("master_weights"):
        model[2].register_forward_pre_hook(lambda _, args: args[0].bfloat16())
        model[2].register_forward_hook(lambda _, args, out: out.float())
    pager.page_module(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, pager.optimizer(optimizer, **kind)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[] if k in list(KINDS)[:2] else pytest.mark.slow) for k in KINDS],
)
def test_training_goes_on_exactly_in_another_budget(
    kind: str, one_thread: None, tmp_path: Path
) -> None:
    with make_pager() as pager:
        model, optimizer = _resumable(pager, KINDS[kind])
        train(World(pager), model, optimizer, 2)
        save(pager.core, tmp_path / "a.pt")
        torch.manual_seed(5)
        losses = train(World(pager), model, optimizer, 2)
        expected = plain((model, optimizer))
    limits = {"host_budget": 0, "disk_budget": "64MiB", "disk_path": tmp_path}
    with make_pager(frames=30, **limits) as pager:
        model, optimizer = _resumable(pager, KINDS[kind])
        load(pager.core, tmp_path / "a.pt")
        for state in optimizer.state.values():
            for value in state.values():
                assert value.nbytes < 512 or type(value) is tp.PagedTensor
        torch.manual_seed(5)
        assert train(World(pager), model, optimizer, 2) == losses
        assert_same(plain((model, optimizer)), expected)


def test_loaded_states_are_nobody_elses(tmp_path: Path) -> None:
    """A plain optimizer too: no state is the saved tensor itself, which may be mapped."""
    torch.manual_seed(3)
    weight = nn.Parameter(torch.randn(40, 50))
    weight.grad = torch.randn(40, 50)
    optimizer = torch.optim.AdamW([weight], lr=torch.tensor(0.1))
    optimizer.step()
    state = optimizer.state_dict()
    twin = torch.optim.AdamW([nn.Parameter(weight.detach().clone())], lr=7.0)
    load_optimizer(twin, state)
    assert_same(plain(twin), plain(optimizer))
    twin.state[twin.param_groups[0]["params"][0]]["exp_avg"].zero_()
    assert optimizer.state[weight]["exp_avg"].any()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        load_optimizer(twin, {"state": {}, "param_groups": []})
    twin.load_state_dict(state)  # no hook is left behind


# -- torch.distributed.checkpoint ----------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_distributed_checkpoint(few_frames: tp.Pager, tmp_path: Path) -> None:
    model = few_frames.page_module(net(1))
    dcp.save({"model": model.state_dict(), "step": 7}, checkpoint_id=tmp_path / "pages")
    dcp.save({"model": few_frames.state_dict()["models"][0]}, checkpoint_id=tmp_path / "copy")
    for name in ("pages", "copy"):
        twin = net(2)
        state = {"model": twin.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path / name)
        assert_same(plain(twin.state_dict()), plain(net(1).state_dict()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = {"model": model.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "pages")
    model.load_state_dict(state["model"])
    assert state["step"] == 7
    assert_same(plain(model.state_dict()), plain(net(1).state_dict()))
    assert type(model.large.weight) is tp.PagedTensor
