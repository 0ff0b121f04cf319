"""Files: those that cannot be read, and those that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import PagerError

_MOST_LINKS = 40  # as Linux


@contextmanager
def reading(path: Path, refused: type[PagerError], what: str) -> Iterator[None]:
    """Raises ``refused`` where ``path``, which should be a ``what``, cannot be read."""
    try:
        yield
    except FileNotFoundError as error:
        raise refused(f"{path}: no such file") from error
    except IsADirectoryError as error:
        raise refused(f"{path}: a folder; name the {what} in it") from error
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise refused(f"{path}: cannot be read: {reason}") from error


def follow_own_links(path: Path) -> Path:
    """Where ``path`` leads if it is a symbolic link of this user's or of root's.

    Raises ``PermissionError`` for a link of anybody else, who could have put it into a shared
    folder to have a file of the user's overwritten.
    """
    for _ in range(_MOST_LINKS):
        try:
            status = path.lstat()
        except FileNotFoundError:
            return path
        if not stat.S_ISLNK(status.st_mode):
            return path
        if status.st_uid not in (0, os.geteuid()):
            reason = f"a link that belongs to user {status.st_uid}; name another file"
            raise PermissionError(errno.EPERM, reason, os.fspath(path))
        path = path.parent / path.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))


@contextmanager
def whole_file(path: Path, *, follow: bool = True) -> Iterator[Path]:
    """A path to write to; the file takes the place of ``path``, mode 0600, when the block is left
    without an error. Until then, and after an error, ``path`` is as it was.

    ``follow``: links of the user are followed, as ``follow_own_links`` does, and what is no regular
    file (``/dev/stdout``) is written into, not replaced. Raises ``OSError``.
    """
    target = follow_own_links(path) if follow else path
    special = follow and path.exists() and not path.is_file()
    descriptor, name = tempfile.mkstemp(
        prefix=f".{target.name}.", suffix=".part", dir=None if special else target.parent
    )
    os.close(descriptor)
    part = Path(name)
    try:
        yield part
        if special:
            with part.open("rb") as source, path.open("wb") as sink:
                shutil.copyfileobj(source, sink)
            return
        part.chmod(0o600)
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
