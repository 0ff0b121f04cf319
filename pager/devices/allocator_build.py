"""Builds the allocator of dense tensors (``dense_allocator.cpp``) with the compiler of the machine.

A library is built at first use, which takes some seconds, for the PyTorch that is installed, and
kept in ``$XDG_CACHE_HOME/tensorpager`` (``~/.cache/tensorpager``), private to the user.
``TENSORPAGER_ALLOCATOR`` is ``off``, or the absolute path of another folder to keep it in, which
nobody else may write to. A build that failed is not tried again for a day with that compiler.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

SWITCH = "TENSORPAGER_ALLOCATOR"
_RETRY_S = 24 * 3600
_BUILD_S = 600
_POLL_S = 0.1
_COMPILERS = ("c++", "g++", "clang++")


@dataclass(frozen=True)
class Recipe:
    """What a library is made of. ``libraries``: of PyTorch, that it is linked with."""

    name: str
    sources: tuple[Path, ...]
    headers: tuple[Path, ...] = ()
    libraries: tuple[str, ...] = ("c10",)
    optimize: str = "-O2"


ALLOCATOR = Recipe(
    "allocator",
    (Path(__file__).with_name("dense_allocator.cpp"),),
    (Path(__file__).with_name("dense_accounts.h"),),
)


class NotBuiltError(Exception):
    """There is no library; the text says why."""


def library(recipe: Recipe = ALLOCATOR, *, again: bool = False) -> Path:
    """The shared library, built if it is not there. ``again``: also if that failed today.

    Raises :class:`NotBuiltError`.
    """
    try:
        return _library(recipe, again=again)
    except OSError as error:  # no room on the disk, no locks on the share
        raise NotBuiltError(f"it cannot be built or kept: {error}") from error


def _library(recipe: Recipe, *, again: bool) -> Path:
    if is_off():
        raise NotBuiltError(f"{SWITCH} is off")
    if sys.platform != "linux":
        raise NotBuiltError(f"it is made for Linux, and this is {sys.platform}")
    compiler = find_compiler()
    command = _build_command(recipe, compiler or "")
    given = os.environ.get(SWITCH, "")
    if given and not os.path.isabs(given):
        raise NotBuiltError(f"{SWITCH}={given!r} is neither 'off' nor an absolute path")
    folder = private_folder(given)
    path = folder / f"{recipe.name}-{_key(recipe, command)}.so"
    if _is_ours(path):
        return path
    if compiler is None:
        raise NotBuiltError("no C++ compiler was found (c++, g++, clang++, or what CXX names)")
    failed = path.with_suffix(f".{_version_of(compiler)}.failed")
    with _only_one(folder):
        if _is_ours(path):  # another process has just built it
            return path
        if not again and _is_ours(failed) and time.time() - failed.stat().st_mtime < _RETRY_S:
            raise NotBuiltError(failed.read_text(errors="replace"))
        try:
            _build(command, path)
        except NotBuiltError as error:
            with suppress(OSError):
                failed.write_text(str(error))
                failed.chmod(0o600)
            raise
    return path


def is_off() -> bool:
    """Whether the user does not want it."""
    return os.environ.get(SWITCH, "").lower() == "off"


def find_compiler() -> str | None:
    """``CXX``, or the first of the usual names that there is."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else _COMPILERS
    return next((found for name in names if (found := shutil.which(name)) is not None), None)


def _build_command(recipe: Recipe, compiler: str) -> list[str]:
    """The command line, but for the file that it makes."""
    root = Path(torch.__file__).parent
    return [
        *(compiler, recipe.optimize, "-std=c++20", "-fPIC", "-shared"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{root / 'include'}", *map(str, recipe.sources), f"-L{root / 'lib'}"),
        *(f"-l{name}" for name in recipe.libraries),
    ]


def _key(recipe: Recipe, command: list[str]) -> str:
    """Of all that the library depends on. The compiler's own name is none of it."""
    texts = [path.read_text() for path in (*recipe.sources, *recipe.headers)]
    versions = (torch.__version__, str(torch.version.git_version), platform.machine())
    text = "\n".join((*versions, *command[1:], *texts))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _version_of(compiler: str) -> str:
    """Another one after an upgrade, or if ``CXX`` names another compiler."""
    path = Path(compiler).resolve()
    status = path.stat()
    text = f"{path} {status.st_size} {status.st_mtime_ns}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _build(command: list[str], path: Path) -> None:
    """Put the library at ``path``: whole, or not at all."""
    with tempfile.TemporaryDirectory(prefix=".build-", dir=path.parent) as folder:
        made = Path(folder, path.name)
        try:
            done = subprocess.run(
                [*command, "-o", str(made)],
                capture_output=True,
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                env={**os.environ, "LC_ALL": "C"},
                timeout=_BUILD_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotBuiltError(f"{command[0]} did not run: {error}") from error
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            told = next((line for line in lines if "error" in line.lower()), (lines or ["?"])[-1])
            raise NotBuiltError(f"{command[0]} ended with {done.returncode}: {told.strip()}")
        made.chmod(0o700)
        os.replace(made, path)


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """One process at a time builds in ``folder``; others wait for as long as that may take."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(folder / ".allocator.lock", flags, 0o600)
    except OSError as error:
        raise NotBuiltError(f"{folder} cannot be written: {error.strerror}") from error
    try:
        _lock(descriptor, folder)
        try:
            yield
        finally:  # said aloud: a child that was forked meanwhile has the file open too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    deadline = time.monotonic() + _BUILD_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise NotBuiltError(
                    f"another process has been building it in {folder} for {_BUILD_S} s"
                ) from None
            time.sleep(_POLL_S)
        else:
            return


def private_folder(given: str = "", *, make: bool = True) -> Path:
    """Where this user's files are kept, the user's cache or ``given``: a real folder of theirs that
    nobody else can write to; our own one is closed to others. Raises ``OSError``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # as the XDG specification says
        base = os.path.expanduser("~/.cache")
    folder = Path(given) if given else Path(base, "tensorpager")
    if not folder.is_absolute():  # no HOME, and no entry in the list of users
        raise OSError(f"this user has no home folder; {SWITCH} may name another one")
    if make:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise OSError(f"{folder} is not a folder of this user")
    mode = stat.S_IMODE(status.st_mode)
    if given and mode & 0o022:  # the user's, perhaps shared on purpose: its mode stays
        raise OSError(f"others can write to {folder}; chmod go-w, or name another")
    if not given and mode & 0o077:
        folder.chmod(0o700)
    return folder


def _is_ours(path: Path) -> bool:
    """A regular file of this user's that nobody else can write."""
    try:
        status = path.lstat()
    except OSError:
        return False
    mine = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    return mine and not stat.S_IMODE(status.st_mode) & 0o022
