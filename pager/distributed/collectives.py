"""Collectives on PagedTensors: ``dist.broadcast(parameter)``, ``DTensor.full_tensor()``.

A collective goes on in another thread, or on another stream, after its op has returned; a dense
view of pages ends with the op. So collectives get copies, and what they have changed is copied
back, for which they are waited for: ``async_op=True`` gives a handle that is done.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import PagerError
from ..tensor.dense_run import LISTS
from ..tensor.dispatcher import serve_kind
from ..tensor.op_info import OpInfo
from ..tensor.paged_tensor import PagedTensor, dense_twin

_KIND = "collective"
_FUNCTIONAL = "_c10d_functional"  # whose ops, but for some, return new tensors
_NAMESPACES = ("c10d", _FUNCTIONAL)
_RECEIVE = ("recv_", "recv_any_source_")


def run_collective(func: Any, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    """``func`` on dense copies; a list that is given back is the caller's own."""
    name = func._opname
    if name in _RECEIVE:  # to wait for it here might be to wait for a send that comes later
        raise PagerError(
            "recv() into a PagedTensor: its bytes are in pages, which may move while they arrive; "
            "receive into a plain tensor and copy_() that"
        )
    copies: dict[int, tuple[PagedTensor, torch.Tensor]] = {}

    def plain(value: Any) -> Any:
        if type(value) is PagedTensor:
            if id(value) not in copies:
                copies[id(value)] = value, dense_twin(value).detach()
            return copies[id(value)][1]
        return [plain(item) for item in value] if type(value) in LISTS else value

    out = func(*map(plain, args), **{key: plain(value) for key, value in kwargs.items()})
    only_reads = func.namespace == _FUNCTIONAL and not func._schema.is_mutable
    if only_reads or name == "send":
        return out
    back = {id(copy): tensor for tensor, copy in copies.values()}

    def finished(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return back.get(id(value), value)
        return type(value)(map(finished, value)) if type(value) in LISTS else value

    _wait(out)
    for tensor, copy in copies.values():
        tensor.detach().copy_(copy)
    return finished(out)


def _wait(out: Any) -> None:
    for value in out if type(out) in LISTS else (out,):
        if type(value) in LISTS:
            _wait(value)
        elif isinstance(value, torch.Tensor):
            torch.ops._c10d_functional.wait_tensor(value)
        elif hasattr(value, "wait"):
            value.wait()


serve_kind(_KIND, run_collective, namespaces=_NAMESPACES)
