"""The allocator of dense tensors on the CPU: what it counts, keeps, caps, and how it is built."""

import errno
import gc
import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import tensorpager as tp
from tensorpager.pager.devices import allocator_build
from tensorpager.pager.devices.allocator_build import NotBuiltError, library
from tensorpager.pager.devices.dense_allocator import Account, AllocatorMeter, DenseAllocator

from .. import programs

MIB = 1 << 20


@pytest.fixture
def account(allocator: DenseAllocator) -> Iterator[Account]:
    made = Account(allocator)
    yield made
    made.close()


def test_it_counts_what_pytorch_asks_for(account: Account) -> None:
    meter = AllocatorMeter(account)
    meter.start()
    one = torch.empty(MIB, dtype=torch.uint8)
    two = torch.empty(1000, dtype=torch.uint8)
    assert account.current == MIB + 1000
    three = torch.empty(3 * MIB + 1, dtype=torch.uint8)
    del one, three
    assert account.current == 1000
    del two
    assert meter.stop() == 4 * MIB + 1001
    _, levels, births = meter.timeline
    assert levels.tolist() == [MIB, MIB + 1000, 4 * MIB + 1001, 3 * MIB + 1001, 1000, 0]
    assert births.tolist() == [births[0] + n for n in (0, 1, 2, 0, 2, 1)]


def test_a_block_is_known_by_its_address(account: Account) -> None:
    meter = AllocatorMeter(account)
    meter.start()
    blocks = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in (MIB, 1000, 0)]
    meter.stop()
    births = [account.birth_at(block.data_ptr()) for block in blocks]
    assert births == [*meter.timeline.birth, 0]


def test_temporaries_inside_ops_count(account: Account) -> None:
    x = torch.ones(64, 64 << 10)
    account.reset()
    torch.logsumexp(x, 1)
    assert x.nbytes <= account.peak < x.nbytes + MIB


def test_older_blocks_are_nobodys_business(account: Account) -> None:
    old = torch.empty(MIB)
    account.reset()
    del old
    assert account.current == account.peak == 0


def test_blocks_of_all_threads_count(account: Account) -> None:
    made: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: made.append(torch.empty(MIB, dtype=torch.uint8)))
    thread.start()
    thread.join()
    assert account.current == MIB


@pytest.mark.parametrize("nbytes", [1, 4096 - 64, 4096, 65535, 65536, 65537, 300_007])
def test_blocks_are_aligned_apart_and_whole(account: Account, nbytes: int) -> None:
    blocks = [torch.full((nbytes,), i, dtype=torch.uint8) for i in range(20)]
    places = sorted(block.data_ptr() for block in blocks)
    assert all(place % 64 == 0 for place in places)
    assert all(b - a >= nbytes for a, b in pairwise(places))
    assert all(bool((block == i).all()) for i, block in enumerate(blocks))


def test_random_blocks_keep_their_bytes(account: Account) -> None:
    """Cut, merged and given back in any order, under a limit of what is kept."""
    rng = np.random.default_rng(0)
    account.limit(None, keep=2 * MIB)
    kept: dict[int, torch.Tensor] = {}
    for i in range(600):
        if kept and rng.random() < 0.5:
            key = int(rng.choice(list(kept)))
            assert bool((kept.pop(key) == key % 251).all())
        size = int(rng.choice([100, 70_000, 100_000, 300_000]) * rng.uniform(0.5, 1.5))
        if len(kept) < 40:
            kept[i] = torch.full((size,), i % 251, dtype=torch.uint8)
    assert account.current == sum(block.nbytes for block in kept.values())
    assert all(bool((block == key % 251).all()) for key, block in kept.items())


def test_freed_memory_is_kept_and_used_again(allocator: DenseAllocator, account: Account) -> None:
    account.limit(None, keep=4 * MIB)
    torch.empty(3 * MIB, dtype=torch.uint8)
    before = allocator.totals()
    for size in (3 * MIB, MIB, 2 * MIB):  # cut, and merged again
        torch.empty(size, dtype=torch.uint8)
    parts = [torch.empty(MIB, dtype=torch.uint8) for _ in range(3)]
    del parts
    assert allocator.totals().mapped == before.mapped
    assert allocator.totals().free == before.free


def test_pages_of_several_free_runs_are_put_together(
    allocator: DenseAllocator, account: Account
) -> None:
    """In sizes that never find a run of theirs: the system is asked for nothing new."""

    def filled(nbytes: int, value: int) -> torch.Tensor:
        return torch.full((nbytes,), value, dtype=torch.uint8)

    def holds(block: torch.Tensor, value: int) -> bool:
        return bool((block.numpy() == value).all())  # no tensor is made

    account.limit(None, keep=8 * MIB)
    blocks = [filled(MIB, i) for i in range(8)]
    before = allocator.totals()
    for turn in range(20):
        gone = turn % 4, 4 + turn % 4
        for i in gone:
            blocks[i] = torch.empty(0)
        large = filled(2 * MIB, 100 + turn)
        assert all(holds(blocks[i], i) for i in range(8) if i not in gone)
        assert holds(large, 100 + turn)
        del large
        for i in gone:
            blocks[i] = filled(MIB, i)
    assert allocator.totals().mapped == before.mapped
    del blocks
    assert allocator.totals().free - before.free == 8 * MIB


KEPT = """
import torch
from tensorpager.pager.devices.dense_allocator import Account, load
allocator = load()
account = Account(allocator)
MIB = 1 << 20
account.limit(None, keep=4 * MIB)
big = torch.empty(3 * MIB, dtype=torch.uint8)
blocks = [torch.empty(MIB, dtype=torch.uint8) for _ in range(8)]
del blocks
print(allocator.totals().free)
del big
print(allocator.totals().free)
account.limit(None, keep=0)
print(allocator.totals().free)
"""


def test_no_more_is_kept_than_was_said(allocator: DenseAllocator) -> None:
    """In a process of its own: here pagers of other tests may keep some, and garbage be freed."""
    done = programs.run("-c", KEPT)
    beside_what_lives = MIB
    assert done.stdout.split() == [str(beside_what_lives), str(4 * MIB), "0"], done.stderr


def test_a_limit_refuses_and_all_goes_on(account: Account) -> None:
    account.limit(2 * MIB, keep=0)
    one = torch.empty(MIB, dtype=torch.uint8)
    with pytest.raises(torch.OutOfMemoryError, match=f"{MIB + 1} bytes more do not fit beside"):
        torch.empty(MIB + 1, dtype=torch.uint8)
    assert account.current == MIB
    torch.empty(MIB, dtype=torch.uint8)
    del one
    torch.empty(2 * MIB, dtype=torch.uint8)


def test_what_others_have_is_not_in_the_refusal(account: Account) -> None:
    made: list[torch.Tensor] = []

    def beside() -> None:
        account.add_guest()
        made.append(torch.empty(3 * MIB, dtype=torch.uint8))

    thread = threading.Thread(target=beside)
    thread.start()
    thread.join()
    account.limit(2 * MIB, keep=0)
    one = torch.empty(MIB, dtype=torch.uint8)
    with pytest.raises(torch.OutOfMemoryError, match=f"do not fit beside {MIB} bytes in"):
        torch.empty(MIB + 1, dtype=torch.uint8)
    assert one.nbytes == MIB


def test_bare_storages_are_not_counted(account: Account) -> None:
    """PyTorch takes those from its default allocator, whatever has replaced it."""
    bare = torch.UntypedStorage(MIB)
    assert account.current == 0
    assert bare.nbytes() == MIB
    bare.resize_(2 * MIB)
    assert torch.empty(MIB, dtype=torch.uint8).untyped_storage().nbytes() == account.peak


def test_the_largest_blocks_are_told(account: Account) -> None:
    sizes = [100_000, 300_000, 200_000, 50]
    blocks = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    found = account.largest(2)
    assert found == [(blocks[1].data_ptr(), 300_000), (blocks[2].data_ptr(), 200_000)]


def test_a_profiler_of_the_users_sees_the_same_events(account: Account) -> None:
    with torch.profiler.profile(profile_memory=True) as profiler:
        x = torch.ones(MIB)
        del x
    events = profiler.profiler.kineto_results.events()
    found = [event.nbytes() for event in events if event.name() == "[memory]"]
    assert found == [4 * MIB, -4 * MIB]


def test_storages_grow_and_shrink(account: Account) -> None:
    x = torch.arange(10, dtype=torch.int64)
    x.resize_(100_000)
    assert x[:10].tolist() == list(range(10))
    assert account.current == 800_000
    x.untyped_storage().resize_(0)
    assert account.current == 0


def test_blocks_outlive_accounts_and_pagers(allocator: DenseAllocator) -> None:
    gc.collect()  # blocks that garbage of other tests holds would go in the middle
    live = allocator.totals().live
    with tp.Pager("1MiB", page_size="64KiB", device="cpu"):
        x = torch.full((MIB,), 7, dtype=torch.uint8)
        small = torch.ones(3)
    assert bool((x == 7).all())
    after = torch.ones(MIB)
    del x, small, after
    assert allocator.totals().live == live


FORKED = """
import os, torch, tensorpager as tp
torch.set_num_threads(1)  # OpenMP's threads are not there in a child
pager = tp.Pager("1MiB", page_size="64KiB", device="cpu")
account = pager.core.backend._account
assert account is not None
account.reset()
account.limit(8 << 20, keep=8 << 20)
x = torch.full((4 << 20,), 7, dtype=torch.uint8)
child = os.fork()
if child == 0:
    y = torch.full((16 << 20,), 1, dtype=torch.uint8)  # no pager here, and no cap
    os._exit(int(not (bool((x == 7).all()) and bool((y == 1).all()))))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), int(x[-1]))
"""


def test_a_forked_child_has_the_blocks_and_no_cap(allocator: DenseAllocator) -> None:
    done = programs.run("-c", FORKED)
    assert done.stdout.split() == ["0", "7"], done.stderr


# -- how it is built -------------------------------------------------------------------------------
COMPILER = """#!/bin/sh
echo "$@" >> {log}
for last; do :; done
{action}
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for a compiler; what it does is in the file. Its calls are in ``calls``."""
    path = tmp_path / "stand-in"
    monkeypatch.setenv("CXX", str(path))
    monkeypatch.setenv(allocator_build.SWITCH, str(tmp_path / "cache"))
    return path


def program(path: Path, action: str) -> None:
    path.write_text(COMPILER.format(log=path.with_name("calls"), action=action))
    path.chmod(0o700)


def calls(path: Path) -> int:
    log = path.with_name("calls")
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_it_is_built_once_and_kept_private(compiler: Path) -> None:
    program(compiler, 'echo library > "$last"')
    built = library()
    assert library() == built
    assert calls(compiler) == 1
    assert stat.S_IMODE(built.parent.stat().st_mode) == 0o700
    assert built.stat().st_mode & 0o077 == 0


def test_processes_that_start_together_build_it_once(compiler: Path) -> None:
    program(compiler, 'sleep 0.2; echo library > "$last"')
    threads = [threading.Thread(target=library) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls(compiler) == 1


def test_a_failed_build_says_why_and_is_not_repeated(compiler: Path) -> None:
    program(compiler, 'echo "x.h:1: fatal error: no such file" >&2; exit 1')
    for _ in range(2):
        with pytest.raises(NotBuiltError, match="ended with 1: x"):
            library()
    assert calls(compiler) == 1
    program(compiler, 'echo library > "$last"')
    assert library(again=True).exists()
    assert library().exists()


def test_another_compiler_is_tried_at_once(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(compiler, "exit 1")
    for _ in range(2):
        with pytest.raises(NotBuiltError, match="ended with 1"):
            library()
    assert calls(compiler) == 1
    program(compiler, "exit 2 # an upgrade")
    with pytest.raises(NotBuiltError, match="ended with 2"):
        library()
    (tmp_path / "other").mkdir()
    program(tmp_path / "other" / "stand-in", 'echo library > "$last"')
    monkeypatch.setenv("CXX", str(tmp_path / "other" / "stand-in"))
    assert library().exists()


def test_who_waits_for_another_build_does_not_wait_for_ever(
    compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(compiler, 'sleep 1; echo library > "$last"')
    thread = threading.Thread(target=library)
    thread.start()
    while not calls(compiler):
        time.sleep(0.01)
    monkeypatch.setattr(allocator_build, "_BUILD_S", 0)
    with pytest.raises(NotBuiltError, match="another process has been building it"):
        library()
    thread.join()


def test_a_child_forked_meanwhile_does_not_keep_the_lock(compiler: Path) -> None:
    program(compiler, "exec sleep 0.3")

    def build() -> None:
        with suppress(NotBuiltError):
            library()

    thread = threading.Thread(target=build)
    thread.start()
    while not calls(compiler):
        time.sleep(0.01)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        thread.join()
        began = time.monotonic()
        with pytest.raises(NotBuiltError):
            library(again=True)
        assert time.monotonic() - began < 30
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_what_is_in_the_way_is_named(
    tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotBuiltError, match="no C\\+\\+ compiler was found"):
        library()
    monkeypatch.setenv(allocator_build.SWITCH, "somewhere")
    with pytest.raises(NotBuiltError, match="'somewhere' is neither 'off' nor an absolute path"):
        library()
    monkeypatch.setenv(allocator_build.SWITCH, "off")
    with pytest.raises(NotBuiltError, match="TENSORPAGER_ALLOCATOR is off"):
        library()
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setenv(allocator_build.SWITCH, str(tmp_path / "link"))
    with pytest.raises(NotBuiltError, match="is not a folder of this user"):
        library()


def test_a_library_that_others_can_write_is_not_loaded(compiler: Path) -> None:
    program(compiler, 'echo library > "$last"')
    built = library()
    built.chmod(0o722)
    library()
    assert calls(compiler) == 2
    assert built.stat().st_mode & 0o022 == 0


def test_a_folder_that_was_given_keeps_its_mode(tmp_path: Path, compiler: Path) -> None:
    """It may be one that others use too: /tmp, a project's."""
    program(compiler, 'echo library > "$last"')
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o755)
    assert library().stat().st_mode & 0o077 == 0
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    folder.chmod(0o1777)
    with pytest.raises(NotBuiltError, match="others can write to"):
        library()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777


def test_a_user_without_a_home_gets_no_folder_named_tilde(
    tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(compiler, 'echo library > "$last"')
    monkeypatch.delenv(allocator_build.SWITCH)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as it does then
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotBuiltError, match="has no home folder"):
        library()
    assert not (tmp_path / "~").exists()


def test_a_disk_without_room_is_a_reason(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(compiler, 'echo library > "$last"')

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(NotBuiltError, match="No space left"):
        library()


WITHOUT = """
import torch, tensorpager as tp
with tp.Pager("1MiB", page_size="64KiB", device="cpu") as pager:
    print(pager.core.backend._account is None)
"""


def test_a_damaged_library_is_no_crash(tmp_path: Path) -> None:
    program(tmp_path / "stand-in", 'echo library > "$last"')
    environment = {
        **os.environ,
        "CXX": str(tmp_path / "stand-in"),
        allocator_build.SWITCH: str(tmp_path / "cache"),
    }
    done = programs.run("-c", WITHOUT, env=environment)
    assert done.stdout.split() == ["True"], done.stderr
