"""``show --by``: tensors put together by module, by kind, or by the op that made them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from ..trace import Trace

_MORE = re.compile(r" \+\d+ more$")  # of a run that several tensors share


def module_of(name: str | None, kind: str) -> str:
    """Path of the module that a tensor of that name belongs to: ``layers.3.attn`` for
    ``layers.3.attn.weight``, its ``….grad``, its ``….exp_avg`` and ``layers.3.attn:saved.0``."""
    if not name:
        return "(no name)"
    path, saved, _ = _MORE.sub("", name).partition(":")
    if saved:
        return path
    parts = path.split(".")
    below = 2 if kind == "optimizer" or (kind == "gradient" and parts[-1] == "grad") else 1
    if len(parts) == 1:
        return "(top)" if kind in ("parameter", "gradient", "optimizer") else path
    return ".".join(parts[:-below]) or "(top)"


def group_names(trace: Trace, by: str) -> list[str]:
    """The group of each tensor, [tensors]."""
    if by == "module":
        return [module_of(name, k) for name, k in zip(trace.tensor_names, trace.tensor_kinds)]
    if by == "kind":
        return trace.tensor_kinds
    return [
        "(persistent)" if lasting else trace.op_names[op]
        for lasting, op in zip(trace.tensor_persistent.tolist(), trace.first_op.tolist())
    ]


def grouped(names: Iterable[str], sizes: Iterable[int], what: str) -> list[dict[str, Any]]:
    """Bytes, and how many of ``what``, per group, most bytes first."""
    found: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, size in zip(names, sizes):
        found[name][0] += 1
        found[name][1] += size
    whole = sum(size for _, size in found.values())
    return [
        {"group": name, what: count, "bytes": size, "share": size / whole if whole else 0.0}
        for name, (count, size) in sorted(found.items(), key=lambda item: -item[1][1])
    ]
