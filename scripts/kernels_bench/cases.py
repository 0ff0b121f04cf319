"""The list of cases: a new kernel is one entry in one of its parts."""

from __future__ import annotations

from .case import Case
from .cases_copies import COPIES
from .cases_elements import ELEMENTS
from .cases_optimizers import OPTIMIZERS

CASES: tuple[Case, ...] = (*OPTIMIZERS, *COPIES, *ELEMENTS)
