"""tensorpager: train PyTorch models that do not fit, inside a byte-hard memory budget.

The names below are loaded when they are first used, so that ``tensorpager.planner`` and most of the
command line work without PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .pager.api import Pager
    from .pager.checkpoint import dcp
    from .pager.errors import (
        CorruptPage,
        DiskWriteLimit,
        InfeasibleBudget,
        PagerError,
        TierFull,
        TraceError,
    )
    from .pager.integrations import hf, lightning
    from .pager.tensor.paged_tensor import PagedTensor

__all__ = [
    "CorruptPage",
    "DiskWriteLimit",
    "InfeasibleBudget",
    "PagedTensor",
    "Pager",
    "PagerError",
    "TierFull",
    "TraceError",
    "__version__",
    "dcp",
    "hf",
    "lightning",
]
__version__ = "0.1.0"
_HOMES = {
    "PagedTensor": ".pager.tensor.paged_tensor",
    "Pager": ".pager.api",
}


_MODULES = {  # for other libraries, which they import
    "dcp": ".pager.checkpoint.dcp",
    "hf": ".pager.integrations.hf",
    "lightning": ".pager.integrations.lightning",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tensorpager' has no attribute {name!r}")
    if name in _MODULES:
        value: Any = import_module(_MODULES[name], __name__)
    else:
        value = getattr(import_module(_HOMES.get(name, ".pager.errors"), __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
