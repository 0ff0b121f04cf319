"""The same inputs twice: plain, and in pages.

Note [Across a page boundary]. Samples of op databases are far smaller than a page, so in their
own pages they are always consecutive. With ``straddle`` an input is therefore a view into a
larger base, placed so that its bytes lie across a page boundary, aligned to 64 bytes in both
worlds (alignment changes the last bits of some CPU kernels). The rest of the base must come out
unchanged, which catches a write-back that is too long.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.utils._pytree import tree_flatten, tree_map

import tensorpager as tp

PAGE_BYTES = 64 * 1024
ALIGN_BYTES = 64
FILL_BYTE = 0x3B


@dataclass(frozen=True)
class Layout:
    """Where an input lies in its base. Sizes, strides and offset count elements."""

    base: torch.Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool

    @property
    def whole(self) -> bool:
        return self.base.shape == self.size and self.base.stride() == self.stride

    def place(self, base: torch.Tensor) -> torch.Tensor:
        """The input as a leaf, in ``base``, which is a copy of ``self.base`` in either world."""
        if self.whole:
            return base
        view = base.as_strided(self.size, self.stride, self.offset).detach()
        return view.requires_grad_(self.requires_grad) if self.requires_grad else view


def pageable(value: object) -> bool:
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
        and not value.is_nested
    )


def layout_of(tensor: torch.Tensor, straddle: bool) -> Layout:
    grad = tensor.requires_grad
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not straddle:
        if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            tensor = tensor.contiguous()
        base = tensor.clone()
        return Layout(base, tuple(base.shape), base.stride(), 0, grad)
    itemsize = tensor.element_size()
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
    span = span if tensor.numel() else 0
    before = -(-span * itemsize // 2 // ALIGN_BYTES) * ALIGN_BYTES
    offset = (PAGE_BYTES - min(before, PAGE_BYTES)) // itemsize
    pages = -(-(offset + span) * itemsize // PAGE_BYTES) + 1
    base = torch.full((pages * PAGE_BYTES,), FILL_BYTE, dtype=torch.uint8).view(tensor.dtype)
    memory = tensor.as_strided((span,), (1,), tensor.storage_offset())
    base[offset : offset + span].copy_(memory)
    return Layout(base, tuple(tensor.shape), tensor.stride(), offset, grad)


@dataclass
class World:
    """One set of inputs. ``inputs`` has the shape of the tree it was built from.

    ``pager`` is None in the plain world.
    """

    inputs: object = None
    pager: tp.Pager | None = None
    straddle: bool = False
    bases: list[torch.Tensor] = field(default_factory=list)
    placed: list[torch.Tensor] = field(default_factory=list)

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [tensor for tensor in self.placed if tensor.requires_grad]

    def page_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Page the parameters in place, as users do or across page boundaries. No-op if plain."""
        if self.pager is None:
            return module
        if not self.straddle:
            return self.pager.page_module(module)
        paged: dict[int, torch.nn.Parameter] = {}
        for owner in module.modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                if id(parameter) not in paged:
                    layout = layout_of(parameter, straddle=True)
                    tensor = layout.place(self.pager.page(layout.base))
                    new = torch.nn.Parameter(tensor, requires_grad=parameter.requires_grad)
                    paged[id(parameter)] = new
                    paged[id(new)] = new
                setattr(owner, name, paged[id(parameter)])
        return module

    def memory(self) -> list[torch.Tensor]:
        """Everything that the inputs lie in, to be compared after an op has run."""
        return [base.detach() for base in self.bases]


class Recipe:
    """Builds plain and paged worlds from one tree of inputs, which is never written to.

    A tensor that occurs twice in the tree occurs twice in the worlds. What cannot be paged
    (sparse, quantised, nested) is cloned; everything that is not a tensor is shared.
    """

    def __init__(self, inputs: object, *, straddle: bool) -> None:
        self._inputs = inputs
        self._straddle = straddle
        tensors = {id(t): t for t in tree_flatten(inputs)[0] if isinstance(t, torch.Tensor)}
        self._others = {key: t for key, t in tensors.items() if not pageable(t)}
        self._layouts = {key: layout_of(t, straddle) for key, t in tensors.items() if pageable(t)}

    def plain(self) -> World:
        return self._build(
            World(), lambda base, requires_grad: base.clone().requires_grad_(requires_grad)
        )

    def paged(self, pager: tp.Pager) -> World:
        return self._build(
            World(pager=pager, straddle=self._straddle),
            lambda base, requires_grad: pager.page(base.detach().requires_grad_(requires_grad)),
        )

    def _build(
        self, world: World, make_base: Callable[[torch.Tensor, bool], torch.Tensor]
    ) -> World:
        placed: dict[int, torch.Tensor] = {}
        for key, layout in self._layouts.items():
            base = make_base(layout.base, layout.whole and layout.requires_grad)
            world.bases.append(base)
            placed[key] = layout.place(base)
        for key, tensor in self._others.items():
            placed[key] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        world.placed = list(placed.values())
        world.inputs = tree_map(lambda value: placed.get(id(value), value), self._inputs)
        return world
