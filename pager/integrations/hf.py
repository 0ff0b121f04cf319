"""``tensorpager.hf``: Hugging Face's libraries. Each name loads the one that it is for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .accelerator import prepare
    from .loading import from_pretrained
    from .trainer import TensorPagerCallback, attach

__all__ = ["TensorPagerCallback", "attach", "from_pretrained", "prepare"]
_HOMES = {
    "TensorPagerCallback": ".trainer",
    "attach": ".trainer",
    "from_pretrained": ".loading",
    "prepare": ".accelerator",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = import_module(_HOMES[name], __package__)
    except ImportError as error:
        if error.name is None or error.name.startswith("tensorpager"):
            raise
        raise ImportError(
            f"tensorpager.hf.{name} needs {error.name}: pip install 'tensorpager[hf]'",
            name=error.name,
        ) from error
    value = globals()[name] = getattr(home, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
