"""Checkpoints of ``train_lm.py``: files of ``torch.save``, written from pages and read into them.

``tensorpager.pager.checkpoint`` does it, a slab of a tensor at a time and all or nothing; here are
the words for users of the script, and who of several ranks writes.
"""

import zipfile
from pathlib import Path
from typing import Any

from tensorpager.pager.checkpoint.together import save_together
from tensorpager.pager.checkpoint.torch_file import map_torch, save_torch
from tensorpager.pager.checkpoint.tree import tensors_of
from tensorpager.pager.errors import PagerError
from tensorpager.pager.tensor.sharded import is_sharded

from .options import UsageError
from .ranks import Ranks


def save_checkpoint(path: Path, content: dict[str, Any], ranks: Ranks | None = None) -> None:
    """All ranks call this. Sharded tensors are put together, others are the first rank's. When it
    returns the file is there, on all ranks. Raises ``OSError``, with an older file as it was.
    """
    if any(map(is_sharded, tensors_of(content))):
        save_together(path, content, lambda: None, lambda read: save_torch(path, content, read))
        return
    if ranks is None or ranks.is_first:
        save_torch(path, content)
    if ranks is not None:
        ranks.all(None)


def load_checkpoint(path: Path, *, whole: bool = True) -> dict[str, Any]:
    """The content of ``path``; its tensors are mapped from the file and read when used.

    ``whole``: read it all once, and compare its check sums. Raises ``UsageError`` for a file that
    is missing, is damaged or is no checkpoint.
    """
    try:
        content, _ = map_torch(path)
        damaged = zipfile.ZipFile(path).testzip() if whole else None
    except OSError as error:
        raise UsageError(f"--resume={path} cannot be read: {error.strerror or error}") from None
    except (PagerError, zipfile.BadZipFile) as error:
        raise UsageError(f"--resume={path} is not a checkpoint: {error}") from None
    if damaged is not None:
        raise UsageError(
            f"--resume={path} is damaged: the check sum of {damaged} in it is wrong; take an older "
            "checkpoint, or copy it again"
        )
    if not isinstance(content, dict) or "format" not in content:
        raise UsageError(f"--resume={path} is not a checkpoint of train_lm.py")
    return content
