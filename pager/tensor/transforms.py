"""``torch.func`` inside ``iteration()``.

``grad``, ``vjp``, ``jacrev`` and ``hessian`` work without hooks on saved tensors, and refuse to
begin while any are on, before they do anything else; PyTorch has no way to tell them that some may
be left out. ``jvp`` and ``jacfwd`` give the hooks tensors without memory. So the first Pager puts a
guard on the functions that these begin with: the hooks of pagers are taken off until the transform
is done, and what is saved meanwhile stays dense. Hooks of others are refused as before. (A guard on
``disable_saved_tensors_hooks``, which refuses, would be in the way of ``torch.compile``: that knows
this function by its identity.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._functorch import eager_transforms

_autograd: Any = torch._C._autograd
_BEGIN = "grad_and_value_impl", "_vjp_with_argnums", "_jvp_with_argnums"
_Pair = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class PagerHooks:
    """Hooks on the tensors that autograd saves, of one thread at a time. As all such hooks they lie
    on a stack of that thread, and only the topmost are asked."""

    def __init__(self) -> None:
        self._on: _Pair | None = None

    def pack(self, tensor: torch.Tensor) -> Any:
        raise NotImplementedError

    def unpack(self, packed: Any) -> torch.Tensor:
        raise NotImplementedError

    def put_on(self) -> None:
        """On this thread; inside a transform they stay off."""
        self.take_off()  # what was left here when they were taken off on another thread
        self._on = self.pack, self.unpack
        if _autograd._saved_tensors_hooks_is_enabled():
            _push(self._on)

    def take_off(self) -> None:
        """From below those of others too; nothing happens where they are not on this thread."""
        self._on = None
        above = []
        while (top := _top()) is not None:
            _autograd._pop_saved_tensors_default_hooks()
            if _owner(top) is self:
                break
            above.append(top)
        for pair in reversed(above):
            _push(pair)

    def _put_back(self, pair: _Pair) -> None:
        if self._on is not None:  # the iteration has not ended meanwhile
            _push(pair)


def guard_transforms() -> None:
    """See the module. Called by every Pager; the first one puts the guards on."""
    for name in _BEGIN:
        transform = getattr(eager_transforms, name, None)
        if transform is not None and not hasattr(transform, "without_pagers"):
            setattr(eager_transforms, name, _guarded(transform))


def _guarded(transform: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(transform)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        with _without_pagers():
            return transform(*args, **kwargs)

    guarded.without_pagers = True  # type: ignore[attr-defined]
    guarded._torchdynamo_inline = transform  # type: ignore[attr-defined]  # what is traced instead
    return guarded


@contextmanager
def _without_pagers() -> Iterator[None]:
    taken = []
    while (top := _top()) is not None and (owner := _owner(top)) is not None:
        _autograd._pop_saved_tensors_default_hooks()
        taken.append((owner, top))
    try:
        yield
    finally:
        for owner, pair in reversed(taken):
            owner._put_back(pair)


def _top() -> _Pair | None:
    return _autograd._top_saved_tensors_default_hooks(True)  # type: ignore[no-any-return]


def _push(pair: _Pair) -> None:
    _autograd._push_saved_tensors_default_hooks(*pair)


def _owner(pair: _Pair) -> PagerHooks | None:
    owner = getattr(pair[0], "__self__", None)
    return owner if isinstance(owner, PagerHooks) else None
