"""Page kernels as ops of PyTorch's dispatcher: one way to define them, one way to pass lists.

An op's schema names all that it reads and writes. Memory in pages is the arena, passed once, and
tables of frame numbers; nothing is reached by an address that is not an argument's. What is written
is marked, ``Tensor(a!)``, so that functionalisation, autograd's version counters and
`torch.compile` see it. An op that may write into pages says so of the arena.

**Lists of operands** of which each may be paged or dense are two lists of tensors, ``xs`` and
``xs_frames``, with one ``numels`` for all lists of a call:

=============  ======================================================  =================
operand i      ``xs[i]``                                               ``xs_frames[i]``
=============  ======================================================  =================
dense          the tensor, contiguous, on the arena's device           no elements
paged          no elements, any shape; its dtype is the operand's      int32 [pages], on the host
=============  ======================================================  =================

A paged tensor without elements is the same as a dense one. `encoded` makes the two lists of
operands, `decoded` is what ops undo it with.

What an op does is written as a function of a `Call`, which has the arguments by the names that they
have in the schema; shapes, dtypes and defaults are named there only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd.graph import increment_version

from .launch import check_arena
from .pieces import Operand, Paged

__all__ = ["NAMESPACE", "Call", "decoded", "define", "encoded", "operand_list"]

NAMESPACE = "tensorpager"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


class Call(SimpleNamespace):
    """The arguments of one call of an op, by the names that its schema gives them."""

    def operands(
        self, name: str, numels: Sequence[int] | None = None, **options: Any
    ) -> list[Operand]:
        """The list of operands of that name; numels : where they are not those of the call."""
        return decoded(
            *(name, self.arena, self.page_bytes, self.numels if numels is None else numels),
            *(getattr(self, name), getattr(self, f"{name}_frames")),
            **options,
        )

    def named(self, *names: str) -> dict[str, Any]:
        """Those arguments, for a launcher that calls them the same."""
        return {name: getattr(self, name) for name in names}


def define(
    schema: str,
    run: Callable[[Call], Any],
    fake: Callable[[Call], Any] | None = None,
    *,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
    instead: str = "detach it, or call the op under torch.no_grad()",
) -> None:
    """Define ``tensorpager::<schema>``.

    run : the op on tensors of any device.
    fake : the same on tensors without data; None for ops that return nothing.
    backward, setup_context : as `torch.library.register_autograd` takes them. Without them the op
        cannot be differentiated, and raises RuntimeError as soon as it is called on a tensor that
        requires a gradient; `instead` is the remedy that it names.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=TAGS)
    overload: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    LIBRARY.impl(name, _by_name(overload, run), "CompositeExplicitAutograd")
    shapes = _by_name(overload, fake or (lambda _call: None))
    torch.library.register_fake(f"{NAMESPACE}::{name}", shapes, lib=LIBRARY)
    if backward is not None:
        torch.library.register_autograd(
            f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=LIBRARY
        )
        return
    LIBRARY.impl(name, _refusing(overload, instead), "Autograd", with_keyset=True)
    if overload._schema.is_mutable:
        LIBRARY.impl(name, _counting(overload), "ADInplaceOrView", with_keyset=True)


def operand_list(name: str, written: str = "") -> str:
    """The two arguments of a list of operands in a schema; written : its alias set, if it is."""
    return f"Tensor{f'({written}!)' if written else ''}[] {name}, Tensor[] {name}_frames"


def encoded(
    operands: Sequence[Operand], device: torch.device | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The two lists that ops take for a list of operands; nothing is copied.

    device : where placeholders of paged operands are made; by default on their arena's.
    """
    dense, frames = [], []
    for operand in operands:
        if isinstance(operand, Paged):
            where = device or operand.arena.device
            dense.append(torch.empty(0, dtype=operand.dtype, device=where))
            frames.append(torch.from_numpy(operand.frames))
        else:
            dense.append(operand)
            frames.append(torch.empty(0, dtype=torch.int32))
    return dense, frames


def decoded(
    name: str,
    arena: torch.Tensor,
    page_bytes: int,
    numels: Sequence[int],
    dense: Sequence[torch.Tensor],
    frames: Sequence[torch.Tensor],
    *,
    cells: bool = False,
) -> list[Operand]:
    """The operands of a list that an op was called with.

    name : of the list, for errors. cells : whether 0-dim tensors stand for any number of elements.

    Raises ValueError where the lists do not fit each other, the numels or the arena.
    """
    if not len(dense) == len(frames) == len(numels):
        raise ValueError(
            f"{name} has {len(dense)} tensors, {len(frames)} tables of frames and {len(numels)} "
            "numels; pass one of each for each operand"
        )
    operands: list[Operand] = []
    for i, (tensor, table, numel) in enumerate(zip(dense, frames, numels, strict=True)):
        where = f"{name}[{i}]"
        if tensor.device != arena.device:
            raise ValueError(
                f"{where} is on {tensor.device}, the arena on {arena.device}; move it there"
            )
        if table.numel():
            check_arena(arena, page_bytes)
            _check_table(where, tensor, table)
            operands.append(Paged(arena, table.detach().numpy(), page_bytes, tensor.dtype, numel))
            continue
        if tensor.numel() != numel and not (cells and not tensor.dim()):
            raise ValueError(
                f"{where} has {tensor.numel()} elements, but numels says {numel}; they must agree"
                " (a paged operand needs its frames)"
            )
        operands.append(tensor.detach())
    return operands


def _check_table(where: str, tensor: torch.Tensor, table: torch.Tensor) -> None:
    if tensor.numel():
        raise ValueError(
            f"{where} has {tensor.numel()} dense elements and {table.numel()} frames; pass an "
            "empty tensor of its dtype for a paged operand, no frames for a dense one"
        )
    if table.dtype != torch.int32 or table.dim() != 1 or table.device.type != "cpu":
        raise ValueError(
            f"the frames of {where} are {table.dtype} {tuple(table.shape)} on {table.device}; "
            "pass int32 [pages] on the host"
        )


def _by_name(overload: torch._ops.OpOverload, function: Callable[[Call], Any]) -> Any:
    """`function` as the dispatcher calls it, which leaves out what has its default."""
    arguments = overload._schema.arguments
    names = [argument.name for argument in arguments]
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(Call(**{**defaults, **dict(zip(names, args, strict=False)), **kwargs}))

    return call


def _refusing(overload: torch._ops.OpOverload, instead: str) -> Callable[..., Any]:
    """What autograd does with an op that has no derivative."""

    def refuse(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            for name, tensor in _tensors(overload, args, kwargs):
                if tensor.requires_grad:
                    raise RuntimeError(
                        f"{overload.name()} cannot be differentiated, but {name} requires a "
                        f"gradient; {instead}"
                    )
        return overload.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)

    return refuse


def _counting(overload: torch._ops.OpOverload) -> Callable[..., Any]:
    """Count up the versions of what is written, as torch's own ops in place do."""
    written = {
        argument.name
        for argument in overload._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }

    def count(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        for name, tensor in _tensors(overload, args, kwargs):
            if name.partition("[")[0] in written:
                increment_version(tensor)
        return overload.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args, **kwargs)

    return count


def _tensors(
    overload: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor argument, with a name that an error can give it."""
    names = [argument.name for argument in overload._schema.arguments]
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, list | tuple):
            for i, each in enumerate(value):
                if isinstance(each, torch.Tensor):
                    yield f"{name}[{i}]", each
