"""Training iterations of G10's public repository in their neutral JSON form.

``tensors`` are ``[id, bytes, global]``; ``kernels`` are ``[id, name, µs, µs with its inputs
faulting, µs with everything faulting, workspace bytes, inputs, outputs]`` (schema
``g10-neutral-1``) or ``[id, µs, tensors]`` (``teraio-neutral-1``, where all count as inputs). A
kernel becomes an op of its undisturbed time: inputs are read, outputs written, workspaces left out.
Global tensors live across iterations. Tensors that no kernel touches are left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..errors import TraceError
from ..shown import shown
from ..trace import Trace, make_trace
from ..trace_check import check_bytes
from .json_file import is_number, is_whole, read_json_object

Op = tuple[str, float, list[int], list[int]]
KERNEL_FIELDS = {"g10-neutral-1": 8, "teraio-neutral-1": 3}


def load(path: Path, page_size: int = 2 << 20) -> Trace:
    """The trace of one workload file, ``.json`` or ``.json.gz``.

    Raises ``TraceError`` naming the file, the entry and the reason.
    """
    path = Path(path)
    document = read_json_object(path, "a workload of G10's repository")
    schema = document.get("schema")
    if not isinstance(schema, str) or schema not in KERNEL_FIELDS:
        raise TraceError(f"{path}: schema {shown(schema)} is none of {', '.join(KERNEL_FIELDS)}")
    tensors = _tensors(_list(document, "tensors", path), path)
    check_bytes(np.array([nbytes for _, nbytes, _ in tensors], np.int64), str(path))
    known = {identity for identity, _, _ in tensors}
    kernels = _list(document, "kernels", path)
    if not kernels:
        raise TraceError(f"{path}: kernels is empty; a trace has at least one op")
    ops = [_op(n, entry, KERNEL_FIELDS[schema], known, path) for n, entry in enumerate(kernels)]
    workload = document.get("workload", path.name.split(".")[0])
    return make_trace(
        tensors,
        ops,
        page_size=page_size,
        source=f"{schema}: {workload}",
        metadata={"workload": str(workload), "reads_and_writes_apart": schema == "g10-neutral-1"},
    )


def _list(document: dict[str, Any], key: str, path: Path) -> list[Any]:
    value = document.get(key)
    if not isinstance(value, list):
        raise TraceError(f"{path}: {key} is {'not a list' if key in document else 'missing'}")
    return value


def _tensors(entries: list[Any], path: Path) -> list[tuple[int, int, bool]]:
    seen: set[int] = set()
    tensors = []
    for number, entry in enumerate(entries):
        where = f"{path}: tensors[{number}]"
        if not isinstance(entry, list) or len(entry) != 3:
            raise TraceError(f"{where} = {shown(entry)} is not [id, bytes, global]")
        identity, nbytes, lasting = entry
        if not is_whole(identity):
            raise TraceError(f"{where}: id {shown(identity)} is not a whole number ≥ 0")
        if identity in seen:
            raise TraceError(f"{where}: id {identity} is there twice")
        if not is_whole(nbytes) or nbytes == 0:
            raise TraceError(f"{where}: {shown(nbytes)} bytes; sizes are whole and at least 1")
        if lasting not in (0, 1):
            raise TraceError(f"{where}: global = {shown(lasting)} is neither 0 nor 1")
        seen.add(identity)
        tensors.append((identity, nbytes, bool(lasting)))
    return tensors


def _op(number: int, entry: Any, fields: int, known: set[int], path: Path) -> Op:
    where = f"{path}: kernels[{number}]"
    if not isinstance(entry, list) or len(entry) != fields:
        raise TraceError(f"{where} is not a list of {fields} fields")
    if fields == 8:
        _, name, duration, _, _, _, reads, writes = entry
    else:
        (identity, duration, reads), writes = entry, []
        name = f"kernel {identity}"
    if not isinstance(name, str):
        raise TraceError(f"{where}: name {shown(name)} is not a string")
    if not is_number(duration):
        raise TraceError(f"{where}: {shown(duration)} µs; times are finite and ≥ 0")
    for role, identities in (("inputs", reads), ("outputs", writes)):
        if not isinstance(identities, list):
            raise TraceError(f"{where}: {role} are not a list")
        for identity in identities:
            if not is_whole(identity) or identity not in known:
                raise TraceError(
                    f"{where}: {role} name tensor {shown(identity)}, which is not listed"
                )
    return name, float(duration), reads, writes
