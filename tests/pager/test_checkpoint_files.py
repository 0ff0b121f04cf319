"""Checkpoint files that are broken, hostile, or not finished: named, not run, not left behind."""

import errno
import json
import os
import pickle
import random
import resource
import signal
import stat
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorpager as tp
from tensorpager.pager.checkpoint import file as checkpoint_file
from tensorpager.pager.checkpoint.file import atomic_file
from tensorpager.pager.checkpoint.save_load import load, save
from tensorpager.pager.checkpoint.torch_file import map_torch
from tensorpager.pager.checkpoint.tree import tensors_of

from .models import make_pager, mlp


class _Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["TP_TEST_EVIL"],)


def test_no_foreign_pickle_is_run(
    tight_pager: tp.Pager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TP_TEST_EVIL", str(tmp_path / "evil"))
    torch.save({"a": torch.ones(1), "b": _Evil()}, tmp_path / "zip.pt")
    (tmp_path / "plain.bin").write_bytes(pickle.dumps(_Evil()))
    torch.save({"a": _Evil()}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("zip.pt", "plain.bin", "old.pt"):
        with pytest.raises(tp.PagerError, match=name):
            load(tight_pager.core, tmp_path / name)
    assert not (tmp_path / "evil").exists()


def _safetensors(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


_TWO = b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
BROKEN = {
    "empty file": (b"", "cut off"),
    "length only": (b"\xff" * 8, "header would have"),
    "header too long": (struct.pack("<Q", 1000) + b"{}", "cut off"),
    "no JSON": (_safetensors(b"{,}"), "not JSON"),
    "deep JSON": (_safetensors(b"[" * 100_000), "not JSON"),
    "long number": (_safetensors(b"{" + b'"a":' + b"9" * 5000 + b"}"), "not JSON"),
    "no object": (_safetensors([1]), "no object"),
    "twice": (_safetensors(_TWO + _TWO[1:-1] + b"}"), "there twice"),
    "entry": (_safetensors({"a": 3}), "'a' lacks dtype"),
    "dtype": (_safetensors({"a": _entry(dtype="F33")}, b"8" * 8), "dtype 'F33'"),
    "dtype list": (_safetensors({"a": _entry(dtype=["F32"])}, b"8" * 8), "'a' has dtype"),
    "negative": (_safetensors({"a": _entry(shape=[-2, -1])}, b"8" * 8), r"shape \[-2, -1\]"),
    "huge": (_safetensors({"a": _entry(shape=[1 << 62] * 9)}, b"8" * 8), "takes"),
    "impossible": (
        _safetensors({"a": _entry(shape=[1 << 62, 1 << 62, 0], offsets=[0, 0])}),
        "shape",
    ),
    "size": (_safetensors({"a": _entry(shape=[3])}, b"8" * 12), "takes 12 bytes and has 8"),
    "gap": (_safetensors({"a": _entry(offsets=[4, 12])}, b"8" * 12), "begins at byte 4"),
    "overlap": (_safetensors({"a": _entry(), "b": _entry()}, b"8" * 8), "'b' begins at byte 0"),
    "cut": (_safetensors({"a": _entry()}, b"8" * 7), "describes 8 bytes of data, and it has 7"),
    "more": (_safetensors({"a": _entry()}, b"8" * 9), "describes 8"),
    "metadata": (_safetensors({"__metadata__": {"a": 1}}), "object of strings"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_safetensors_files_are_named(case: str, tmp_path: Path) -> None:
    content, words = BROKEN[case]
    path = tmp_path / "broken.safetensors"
    path.write_bytes(content)
    with make_pager() as pager, pytest.raises(tp.PagerError, match=words) as caught:
        load(pager.core, path)
    assert "broken.safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pt_files_with_wrong_bytes(tmp_path: Path) -> None:
    """Read, or refused by name; never anything else."""
    path, randoms = tmp_path / "bad.pt", random.Random(1)
    torch.save({"a": torch.ones(50, 3)[:, 1], "b": [torch.arange(9), (1, "x", None)]}, path)
    whole = path.read_bytes()
    refused = []
    for _ in range(25):
        content = bytearray(whole)
        for _ in range(randoms.choice((1, 3, 30))):
            content[randoms.randrange(len(content))] = randoms.randrange(256)
        path.write_bytes(content)
        try:
            found, _ = map_torch(path)
            for tensor in tensors_of(found):
                tensor.sum()
        except tp.PagerError as error:
            refused.append(str(error))
    assert 0 < len(refused) < 25
    assert all("bad.pt" in words for words in refused)


def test_cut_pt_files_are_named(tight_pager: tp.Pager, tmp_path: Path) -> None:
    path = tmp_path / "cut.pt"
    torch.save({"a": torch.ones(5000)}, path)
    whole = path.read_bytes()
    for length in (0, 3, 100, 5000, len(whole) - 10):
        path.write_bytes(whole[:length])
        says = "damaged: its end is missing" if length > 3 else "not a PyTorch checkpoint"
        with pytest.raises(tp.PagerError, match=rf"cut\.pt is .*{says}"):
            load(tight_pager.core, path)
    torch.save([1, 2], path)
    with pytest.raises(tp.PagerError, match="not a state dict"):
        load(tight_pager.core, path)
    with pytest.raises(tp.PagerError, match="holds none of"):
        load(tight_pager.core, tmp_path)
    with pytest.raises(FileNotFoundError):
        load(tight_pager.core, tmp_path / "none.pt")


# -- all or nothing ------------------------------------------------------------------------------
NAMELESS = pytest.mark.parametrize("nameless", [True, False])


def _without_nameless(monkeypatch: pytest.MonkeyPatch, nameless: bool) -> None:
    if not nameless:  # as on file systems without O_TMPFILE
        monkeypatch.setattr(checkpoint_file, "open_tmpfile", lambda folder: None)


@NAMELESS
def test_an_error_leaves_the_older_file_and_nothing_else(
    nameless: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_nameless(monkeypatch, nameless)
    path = tmp_path / "a.pt"
    path.write_bytes(b"older")

    def fail_after(file: Any) -> None:
        file.write(b"x" * 1000)
        file.flush()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), atomic_file(path) as file:
        fail_after(file)
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"older", ["a.pt"])
    with atomic_file(path) as file:
        file.write(b"newer")
        assert path.read_bytes() == b"older"
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"newer", ["a.pt"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_full_disk(suffix: str, tight_pager: tp.Pager, tmp_path: Path) -> None:
    """The kernel refuses to let a file grow beyond a limit, as it does on a full disk."""
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(b"older")
    model = tight_pager.page_module(mlp())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match="nothing was saved") as caught:
            save(tight_pager.core, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"older", [path.name])
    save(tight_pager.core, path)
    with torch.no_grad():
        model[0].weight.zero_()
    load(tight_pager.core, path)
    assert model[0].weight.any()


@NAMELESS
def test_a_kill_leaves_nothing_that_the_next_save_does_not_remove(
    nameless: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_nameless(monkeypatch, nameless)
    path = tmp_path / "a[1]*.pt"
    path.write_bytes(b"older")
    ready, say = os.pipe()
    child = os.fork()
    if not child:
        with atomic_file(path) as file:
            file.write(b"half")
            file.flush()
            os.write(say, b"!")
            signal.pause()
        os._exit(1)
    try:
        assert os.read(ready, 1) == b"!"
        assert len(os.listdir(tmp_path)) == (1 if nameless else 2)
        with atomic_file(path) as file:  # beside a living one
            file.write(b"newer")
        assert len(os.listdir(tmp_path)) == (1 if nameless else 2)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(say)
    assert path.read_bytes() == b"newer"
    assert len(os.listdir(tmp_path)) == (1 if nameless else 2)
    with atomic_file(path) as file:
        file.write(b"newest")
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"newest", [path.name])
