"""Files that other libraries write of a paged model, by reading through addresses, are those of a
plain one, byte for byte."""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorpager as tp
from tensorpager.pager.debug.chaos import chaos
from tensorpager.pager.disk.mounts import IN_RAM, mount_of
from tensorpager.pager.optim.step_need import peak_of_results
from tensorpager.pager.tensor import images

from .models import make_pager

PROTECTED = "---p"


class Tied(nn.Module):
    """An embedding that is also the head, small weights that share a page, a buffer, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(400, 96)
        self.body = nn.Sequential(nn.Linear(96, 96), nn.LayerNorm(96))
        self.head = nn.Linear(96, 400, bias=False)
        self.head.weight = self.embedding.weight
        self.small = nn.Parameter(torch.randn(33).to(torch.bfloat16))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.across = nn.Parameter(torch.randn(40, 30).t())
        self.register_buffer("seen", torch.arange(3))


def tied() -> Tied:
    torch.manual_seed(3)
    return Tied()


@pytest.fixture(params=["memory", "files"])
def pager(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tp.Pager]:
    """In ``files`` no image may be memory, and everything is evicted after each op."""
    if request.param == "files":
        monkeypatch.setattr(images, "IN_MEMORY_BYTES", 0)
        skip_unless_on_disk(tmp_path)
    options = {"disk_budget": "8MiB", "disk_path": tmp_path, "host_budget": "1MiB"}
    with (
        make_pager(frames=8, **options) as pager,
        chaos(pager.core) if request.param == "files" else nullcontext(),
    ):
        yield pager


def skip_unless_on_disk(folder: Path) -> None:
    mount = mount_of(folder)
    if mount is None or mount.kind in IN_RAM:
        pytest.skip(f"{folder} is in memory, so a file there is no way out of it")


def mapping_at(address: int) -> str:
    """The line of /proc/self/maps."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < last:
            return line
    raise AssertionError(f"nothing at {address:#x}")


def saved(state: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file, **options)
    return file.getvalue()


def bytes_of(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


# -- libraries -------------------------------------------------------------------------------------
def test_safetensors(pager: tp.Pager, tmp_path: Path) -> None:
    st = pytest.importorskip("safetensors.torch")
    plain, paged = tied(), pager.page_module(tied())
    for name, model in (("plain", plain), ("paged", paged)):
        st.save_model(model, tmp_path / f"{name}.model")
        state = {k: v.contiguous() for k, v in model.state_dict().items() if k != "head.weight"}
        st.save_file(state, tmp_path / f"{name}.file")
        with pytest.raises(RuntimeError, match="share memory"):
            st.save(model.state_dict())
    del state
    for suffix in ("model", "file"):
        files = [(tmp_path / f"{name}.{suffix}").read_bytes() for name in ("plain", "paged")]
        assert files[0] == files[1], suffix
    assert not st.load_model(paged, tmp_path / "plain.model")[0]
    gc.collect()
    assert mapping_at(paged.head.weight.untyped_storage().data_ptr()).split()[1] == PROTECTED


def test_torch_save(pager: tp.Pager) -> None:
    plain, paged = tied(), pager.page_module(tied())
    for options in ({}, {"_use_new_zipfile_serialization": False}):
        # The old format has ids of objects in it.
        same = saved(paged.state_dict(), **options) == saved(plain.state_dict(), **options)
        assert same or options
        state = torch.load(io.BytesIO(saved(paged.state_dict(), **options)), weights_only=True)
        assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
        assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    assert saved(paged.across) == saved(plain.across)
    assert saved(paged.head.weight[5:9]) == saved(plain.head.weight[5:9])
    one, same = pickle.loads(pickle.dumps([paged.scale, paged.small]))
    assert type(one) is type(same) is nn.Parameter
    assert torch.equal(one, plain.scale)
    assert torch.equal(same, plain.small)


def test_torch_save_of_a_model_and_its_optimizer() -> None:
    files = []
    for pager in (None, make_pager()):
        model = tied()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        if pager is not None:
            pager.page_module(model)
            pager.optimizer(optimizer)
        model.body(model.embedding(torch.arange(9))).square().sum().backward()
        optimizer.step()
        files.append(saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
        if pager is not None:
            pager.close()
    loaded = [torch.load(io.BytesIO(file), weights_only=True) for file in files]
    torch.testing.assert_close(loaded[1], loaded[0], rtol=0, atol=0)


# -- addresses -------------------------------------------------------------------------------------
def test_an_address_outside_of_saving(pager: tp.Pager) -> None:
    paged = pager.page(torch.randn(50, 40))
    with pytest.raises(tp.PagerError, match=r"with pager\.saving\(\):"):
        paged.data_ptr()
    assert pager.page(torch.empty(0)).data_ptr() == 0


def test_addresses_inside_of_saving(pager: tp.Pager) -> None:
    plain = [torch.randn(300, 200), torch.randn(7), torch.randn(500, 100)]
    paged = [pager.page(tensor) for tensor in plain]
    with pager.saving():
        addresses = [tensor.data_ptr() for tensor in paged]
        with pager.saving():
            assert [tensor.data_ptr() for tensor in paged] == addresses
        assert [t.untyped_storage().data_ptr() for t in paged] == addresses
        assert paged[0][3:].data_ptr() == addresses[0] + 3 * 200 * 4
        assert [bytes_of(tensor) for tensor in paged] == [t.numpy().tobytes() for t in plain]
        assert mapping_at(addresses[0]).split()[1] in ("r--p", "r--s")
    gc.collect()
    for tensor, address in zip(paged, addresses):
        assert mapping_at(address).split()[1] == PROTECTED
        with pytest.raises(tp.PagerError, match="saving"):
            tensor.data_ptr()
    assert not pager.core.images.in_memory
    if images.IN_MEMORY_BYTES:
        assert pager.core.images.has_room(images.IN_MEMORY_BYTES)


def test_an_image_that_dies_in_another_thread_is_not_cleared_under_anybody(pager: tp.Pager) -> None:
    plain = torch.randn(300, 200)
    paged = pager.page(plain)
    every = pager.core.images
    untyped = paged.untyped_storage()
    with every._alone():
        last = [every._image(paged._storage, untyped)]
        other = threading.Thread(target=last.clear)
        other.start()
        other.join()
        assert mapping_at(untyped.data_ptr()).split()[1] != PROTECTED
        again = every._image(paged._storage, untyped)  # a new one, in the same place
    with pager.saving():
        assert paged.data_ptr() == untyped.data_ptr()
        assert bytes_of(paged) == plain.numpy().tobytes()
    del again
    gc.collect()
    assert mapping_at(untyped.data_ptr()).split()[1] == PROTECTED
    assert not every.in_memory


def test_images_are_in_files_beyond_a_few_bytes(pager: tp.Pager, tmp_path: Path) -> None:
    paged = pager.page(torch.randn(300, 200))
    with pager.saving():
        line = mapping_at(paged.data_ptr())
    assert line.split()[1] == ("r--p" if images.IN_MEMORY_BYTES else "r--s")
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


def test_an_image_follows_writes(pager: tp.Pager) -> None:
    model = pager.page_module(tied())
    state = model.state_dict()
    held = state["head.weight"]
    view = held.view(-1)[96:]
    with torch.no_grad():
        for write in (
            lambda: None,
            lambda: model.embedding.weight.mul_(2),
            lambda: model.embedding.weight.data.add_(1),
            lambda: held[5].zero_(),
            lambda: model.load_state_dict(tied().state_dict()),
        ):
            write()
            assert bytes_of(held) == held.numpy().tobytes()
            assert bytes_of(view) == view.numpy().tobytes()
        with model.embedding.weight.pin() as dense:
            assert bytes_of(held) == held.numpy().tobytes()
            dense.fill_(4)
        assert bytes_of(held) == held.numpy().tobytes()


def test_what_holds_an_image(pager: tp.Pager) -> None:
    model = pager.page_module(tied())
    address = model.body[0].weight.untyped_storage().data_ptr()
    state = model.body.state_dict()
    assert mapping_at(address).split()[1] == PROTECTED
    assert state["0.weight"].data_ptr() == address
    view = state["0.weight"][1:]
    del state
    assert mapping_at(address).split()[1] != PROTECTED
    del view
    gc.collect()
    assert mapping_at(address).split()[1] == PROTECTED
    with pytest.raises(tp.PagerError, match="saving"):
        model.state_dict(keep_vars=True)["body.0.weight"].data_ptr()
    with pytest.raises(tp.PagerError, match="saving"):
        model.body[0].weight.data_ptr()
    assert len(copy.deepcopy(model)._state_dict_hooks) == 1


def test_a_disk_that_fails_meanwhile(
    pager: tp.Pager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(pager: tp.Pager, nbytes: int) -> Iterator[int]:
        yield os.open(tmp_path / "file", os.O_RDONLY | os.O_CREAT)

    monkeypatch.setattr(images, "open_scratch_files", read_only)
    plain = torch.randn(300, 200)
    paged = pager.page(plain)
    with pager.saving():
        assert bytes_of(paged) == plain.numpy().tobytes()


def test_a_closed_pager() -> None:
    with make_pager() as pager:
        paged = pager.page(torch.ones(3))
        storage = paged.untyped_storage()
    assert storage.data_ptr() == paged.untyped_storage().data_ptr()
    with pytest.raises(tp.PagerError, match="was closed"):
        paged.data_ptr()
    with pytest.raises(tp.PagerError, match="was closed"):
        pager.saving()


def test_pages_are_no_dense_results() -> None:
    with make_pager() as pager:
        paged = pager.page(torch.ones(1000))
        assert peak_of_results(lambda: paged.view(10, 100)) == 0
        assert peak_of_results(lambda: paged + 1) == 4000


# -- memory ----------------------------------------------------------------------------------------
CHILD = """
import resource, sys
from pathlib import Path
import torch, tensorpager as tp
from torch import nn
from safetensors.torch import save_file, save_model
torch.set_num_threads(1)
folder = Path(sys.argv[1])
pager = tp.Pager(device_budget="24MiB", disk_budget="240MiB", disk_path=folder, page_size="256KiB",
                 dense_reserve="8MiB", device="cpu", policy="lru")
with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(32)), nn.Linear(1024, 8192))
pager.page_module(model)
with torch.no_grad():
    for p in model.parameters():
        p.fill_(0.5)
save_file({"w": model[32].state_dict()["weight"]}, folder / "warm")
lines = Path("/proc/self/status").read_text().splitlines()
used = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))
most = used + (32 << 20) + (16 << 20)  # the largest tensor, and a buffer
resource.setrlimit(resource.RLIMIT_DATA, (most, most))
save_model(model, folder / "model")
torch.save(model.state_dict(), folder / "model.pt")
with pager.saving():
    save_file(dict(model.named_parameters()), folder / "parameters")
"""


@pytest.mark.slow
def test_memory_while_saving(tmp_path: Path) -> None:
    """160 MiB under 24 MiB: the kernel gives no more private memory than one tensor and a buffer.
    (The files that images are in are mapped, which it can take back.)"""
    pytest.importorskip("safetensors")
    skip_unless_on_disk(tmp_path)
    subprocess.run([sys.executable, "-c", CHILD, str(tmp_path)], check=True, timeout=300)
    for name in ("model", "model.pt", "parameters"):
        assert (tmp_path / name).stat().st_size > 160 << 20


# -- errors ----------------------------------------------------------------------------------------
def test_errors_come_whole_out_of_other_processes() -> None:
    error = tp.InfeasibleBudget("too little", minimum=5)
    error.add_note("in the test")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is tp.InfeasibleBudget
        assert (str(twin), twin.minimum, twin.__notes__) == ("too little", 5, ["in the test"])
    page = tp.CorruptPage("torn", tier="host", slot=3, page=4, tensor="w")
    twin = pickle.loads(pickle.dumps(page))
    assert (str(twin), vars(twin)) == ("torn", vars(page))
