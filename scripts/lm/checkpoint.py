"""Checkpoints of ``train_lm.py``: files of ``torch.save``, written from pages and read into them.

``tensorpager.pager.checkpoint.torch_file`` does it, a slab of a tensor at a time and all or
nothing; here are the words for users of the script.
"""

from pathlib import Path
from typing import Any

from tensorpager.pager.checkpoint.torch_file import map_torch, save_torch
from tensorpager.pager.errors import PagerError

from .options import UsageError

save_checkpoint = save_torch


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The content of ``path``; its tensors are mapped from the file and read when used.

    Raises ``UsageError`` for a file that is missing or is not a checkpoint.
    """
    try:
        content, _ = map_torch(path)
    except OSError as error:
        raise UsageError(f"--resume={path} cannot be read: {error.strerror or error}") from None
    except PagerError as error:
        raise UsageError(f"--resume={path} is not a checkpoint: {error}") from None
    if not isinstance(content, dict) or "format" not in content:
        raise UsageError(f"--resume={path} is not a checkpoint of train_lm.py")
    return content
