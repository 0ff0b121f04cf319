"""Finds trainings that publish metrics, and reads them, without torch and out of their way.

Everything read here is somebody else's: a process may name its memory as ours, a file may be
anything. ``decode`` checks every byte, and what is not this user's is not opened.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from .format import RECORD_BYTES, MetricsError, Record, decode
from .outputs import NAME, is_locked, open_own, remove_if_same

_LINK = f"/memfd:{NAME} (deleted)"
_TRIES, _TRY_SECONDS = 50, 0.002
_PROC = Path("/proc")


class Training:
    """One Pager of a running process, or of one that has just ended: what was read stays readable.

    ``pid``: of the process as it is seen from here; ``record``: the latest that was read. ``name``
    is what the command line calls it: the PID, with ``.2`` for the second Pager of a process.
    """

    def __init__(self, fd: int, path: Path) -> None:
        """Takes over ``fd``, open on ``path``. Raises ``MetricsError`` if there is no record."""
        self._fd = fd
        self.close = weakref.finalize(self, os.close, fd)  # also of one that nobody closes
        self.path = path
        try:
            self.record = self.read()
        except BaseException:
            self.close()
            raise
        self.pid = self.record.pid
        self.name = str(self.pid)

    def read(self) -> Record:
        """What is published now. Raises ``MetricsError`` for what is no record."""
        for _ in range(_TRIES):
            # One byte more than there should be, so that a longer file is noticed.
            data = os.pread(self._fd, RECORD_BYTES + 1, 0)
            record = decode(data) if data else None
            if record is not None:
                self.record = record
                return record
            time.sleep(_TRY_SECONDS)
        raise MetricsError("holds no whole record; it is damaged, or its writer was stopped midway")

    @property
    def ended(self) -> bool:
        """Whether the Pager was closed, or its process has ended in any way."""
        if self.record.closed:
            return True
        if self.path.parent.parent.parent != _PROC:
            return not is_locked(self._fd)
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except OSError:
            return True


# -- finding -------------------------------------------------------------------------------------
def find_trainings() -> list[Training]:
    """All that this user runs, oldest first. What cannot be read is left out."""
    found = []
    for entry in os.scandir(_PROC):
        if entry.name.isdecimal():
            with suppress(MetricsError):
                found += _trainings_of(int(entry.name))
    return sorted(found, key=lambda training: training.record.started_ns)


def open_training(target: str) -> Training:
    """By PID (``"1234"``, ``"1234.2"`` for its second Pager) or by the path of a metrics file.

    Raises ``NoSuchProcess`` for a PID that is not there (any more), and ``MetricsError``.
    """
    pid, dot, number = target.partition(".")
    if not pid.isdecimal() or (dot and not number.isdecimal()):
        return _open_file(Path(target))
    found = _trainings_of(int(pid), complain=True)
    index = int(number) - 1 if dot else 0
    if not found:
        raise MetricsError(
            f"process {pid} publishes no metrics; make its Pager with metrics=True (train_lm.py: "
            "--metrics)"
        )
    if not 0 <= index < len(found):
        _close(found)
        raise MetricsError(f"process {pid} has {len(found)} Pagers; there is no {target}")
    chosen = found.pop(index)
    _close(found)
    return chosen


class NoSuchProcess(MetricsError):  # noqa: N818 (an answer, not a fault)
    """There is no process of that PID: it has ended, or never was."""


def _close(trainings: list[Training]) -> None:
    for training in trainings:
        training.close()


def _trainings_of(pid: int, *, complain: bool = False) -> list[Training]:
    """The Pagers of a process in the order in which they were made. ``complain``: raise if it is
    not ours to read, or what it holds is no record."""
    folder = _PROC / str(pid)
    found: list[Training] = []
    try:
        _check_owner(folder)
        inner = _inner_pid(folder)
        for path in _memories(folder):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                training = Training(fd, path)
            except MetricsError as error:
                if complain:
                    _close(found)
                    raise MetricsError(f"the metrics of process {pid}: {error}") from error
                continue
            if not training.ended and inner in (None, training.record.pid):
                training.pid = pid
                found.append(training)
            else:  # over, or a forked child has inherited it
                training.close()
    except FileNotFoundError:  # it ends right now
        found = []
    except OSError as error:
        if complain:
            raise MetricsError(f"process {pid} cannot be looked into: {error.strerror}") from error
    found.sort(key=lambda training: training.record.started_ns)
    for number, training in enumerate(found, 1):
        training.name = str(pid) if number == 1 else f"{pid}.{number}"
    return found


def _check_owner(folder: Path) -> None:
    try:
        owner = folder.stat().st_uid
    except FileNotFoundError as error:
        reason = f"there is no process {folder.name}: it has ended, or never was"
        raise NoSuchProcess(reason) from error
    if owner != os.geteuid():
        raise MetricsError(
            f"process {folder.name} belongs to user {owner} and you are {os.geteuid()}; run "
            "tensorpager top as that user"
        )


def _memories(folder: Path) -> Iterator[Path]:
    """Descriptors of a process that are open on published memory, one for each memory."""
    seen = set()
    for entry in sorted((folder / "fd").iterdir(), key=lambda path: int(path.name)):
        with suppress(FileNotFoundError):
            if os.readlink(entry) == _LINK and (inode := entry.stat().st_ino) not in seen:
                seen.add(inode)
                yield entry


def _inner_pid(folder: Path) -> int | None:
    """What the process itself takes its PID to be: another one in a container."""
    for line in (folder / "status").read_text(errors="replace").splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    return None


def _open_file(path: Path) -> Training:
    """Raises ``MetricsError``; with the path in its message."""
    fd = open_own(path, os.O_RDONLY)
    try:
        return Training(fd, path)
    except MetricsError as error:
        raise MetricsError(f"{path} {error}") from error


def remove_left_over(training: Training) -> bool:
    """Remove the file that a killed training left; whether there was one."""
    path = training.path
    if path.is_relative_to(_PROC) or training.record.closed or is_locked(training._fd):
        return False
    remove_if_same(path, training._fd)
    return True
