"""tensorpager: train PyTorch models that do not fit, inside a byte-hard memory budget."""

from .pager.errors import CorruptPage, InfeasibleBudget, PagerError, TierFull, TraceError
from .pager.paged_tensor import PagedTensor
from .pager.runtime import Pager

__all__ = [
    "CorruptPage",
    "InfeasibleBudget",
    "PagedTensor",
    "Pager",
    "PagerError",
    "TierFull",
    "TraceError",
    "__version__",
]
__version__ = "0.1.0"
