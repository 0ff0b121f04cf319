"""Tensors put together by module, by kind, or by the op that made them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..trace import Bools, Ints, Trace

BY = ("tensor", "module", "kind", "op")
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


def live_groups(trace: Trace, by: str, live: Bools) -> list[dict[str, Any]]:
    """Bytes of the ``live`` tensors per group, most first."""
    mine = np.flatnonzero(live)
    names = group_names(trace, by)
    code, found = _codes([names[tensor] for tensor in mine.tolist()])
    size = _sums(code, trace.tensor_bytes[mine], len(found))
    count = np.bincount(code, minlength=len(found))
    whole = int(size.sum())
    return [
        {
            "group": found[group],
            "tensors": int(count[group]),
            "bytes": int(size[group]),
            "share": int(size[group]) / whole,
        }
        for group in np.argsort(-size, kind="stable").tolist()
    ]


def hot_groups(trace: Trace, by: str, rows: Ints, size: Ints) -> list[dict[str, Any]]:
    """Bytes that the accesses ``rows``, of ``size`` bytes each, touch, per group, most first; by
    op: the op that accesses."""
    if by == "op":
        names = [trace.op_names[op] for op in trace.access_op[rows].tolist()]
    else:
        of_tensor = group_names(trace, by)
        names = [of_tensor[tensor] for tensor in trace.access_tensor[rows].tolist()]
    code, found = _codes(names)
    total = _sums(code, size, len(found))
    count = np.bincount(code, minlength=len(found))
    whole = int(total.sum())
    return [
        {
            "group": found[group],
            "accesses": int(count[group]),
            "touched_bytes": int(total[group]),
            "share": int(total[group]) / whole,
        }
        for group in np.argsort(-total, kind="stable").tolist()
    ]


def _codes(names: Iterable[str]) -> tuple[Ints, list[str]]:
    index: dict[str, int] = {}
    codes = np.array([index.setdefault(name, len(index)) for name in names], np.int64)
    return codes, list(index)


def _sums(code: Ints, size: Ints, groups: int) -> Ints:
    total = np.zeros(groups, np.int64)
    np.add.at(total, code, size)
    return total
