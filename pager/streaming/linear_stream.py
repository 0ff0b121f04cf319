"""``F.linear`` with a weight that is never on the device whole: it streams through, slab by slab.

A slab is some whole rows of the weight, on the device together; the next one is read ahead
(``slabs.py``). Inside it the product goes *block* by block: the rows of one page, or one row if it
is longer than a page. ::

    pages    |    p0    |    p1    |    p2    |    p3    | ...
    blocks   | rows 0 to 4 | rows 5 to 9 | rows 10 to 14 | ...     a row may straddle two pages
    slabs    |------------ in use -------|---- coming ---|

    forward          out[:, block]  = x @ W[block].T + bias[block]
    input gradient   total         += grad[:, block] @ W[block]          in order
    weight gradient  dW[block]      = grad[:, block].T @ x               written into pages

*Bits.* Blocks depend on the weight's shape and the page size alone: not on the budget, nor on where
pages are, nor on how many fit in a slab. So results are the same bits from run to run, in metered
and planned iterations, and under any budget under which the weight streams (on CUDA the kernel on
pages adds up in an order of its own; which way is taken depends on shapes alone, too). They may
differ from those of one whole product, as those of any two shapes of a matrix product may:

* forward: the same sums of K terms, perhaps in another order;
* input gradient: one partial sum for each block, added up in order, in float32 for half precision
  (so that it is rounded to the dtype once);
* weight gradient: the same sums over the rows of x.

Each result is within ``2 * terms * eps * sum(abs(products))`` of the whole product's.

The weight's gradient is a PagedTensor of kind "gradient": no more than a slab of it is on the
device, and no dense copy of it is ever made. Accumulating into it is an in-place addition, which
goes slab by slab as well.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from ...kernels.launch import runs_triton
from ...kernels.linear import linear_forward
from ...kernels.linear_choice import choose
from ...kernels.linear_grad import linear_input_grad, linear_weight_grad
from ...kernels.paged_matrix import DTYPES, PagedMatrix
from ..budget.fits import fits
from ..budget.placement import Weight
from ..core import PagedStorage
from ..memory.page_table import Int32
from ..tensor.paged_tensor import PagedTensor
from ..tensor.slabs import fair_share, pages_of, stream
from .table_gradient import new_gradient

_HALVES = (torch.float16, torch.bfloat16)
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, PagedTensor)
_functorch_level = torch._C._functorch.peek_interpreter_stack


def is_streamed(inputs: torch.Tensor, weight: PagedTensor) -> bool:
    """Whether a linear reads ``weight`` slab by slab, by the verdict on it (``placement.py``).

    The first linear makes one: it streams if its pages do not fit (``fits.py``) beside a dense
    gradient of it, which training with a whole one needs. Where the inputs and the result, which
    are dense, take more than the budget by themselves, streaming would not help: the ordinary way
    then says which budget would.
    """
    run, pager = weight._storage.run, weight._storage.pager
    if run.streamed is not None:
        return run.streamed
    whole = fits(pager.budget, run.count, dense_bytes=_own_dense_bytes(weight))
    columns = max(1, weight.size(-1))
    dense = inputs.numel() * (columns + weight.numel() // columns) // columns
    if not whole and dense * inputs.element_size() > pager.budget.bytes:
        return False
    pager.budget.placement.judge(run, streamed=not whole)
    return not whole


@contextmanager
def watched(
    weight: PagedTensor, inputs: torch.Tensor, bias: Any = None, *, of_weight: bool = False
) -> Iterator[Weight]:
    """Inside, a product of a whole weight takes place in a metered iteration (``placement.py``).
    ``of_weight``: that is its gradient, for which the weight itself is not needed."""
    pager, matrix = weight._storage.pager, _Matrix.of(weight)
    starts = range(0, matrix.rows, matrix.block_rows)
    ends = [min(start + matrix.block_rows, matrix.rows) for start in starts]
    pages = max((len(matrix.pages(*span)) for span in zip(starts, ends)), default=1)
    block = matrix.block_rows * matrix.row_bytes
    more = block + pager.backend.alignment if pages > 1 or of_weight else 0
    if weight.dtype in _HALVES and not of_weight:  # added up in single precision
        wide = torch.float32.itemsize
        rows = inputs.numel() // max(1, inputs.size(-1))
        more += block // weight.dtype.itemsize * wide
        more += rows * (matrix.columns + matrix.block_rows) * wide
    others = [t for t in (inputs, bias) if type(t) is PagedTensor]  # which are copied
    more += sum(t.numel() * t.dtype.itemsize for t in others)
    noted = _noted(weight, max([pages, *(t._storage.run.count for t in others)]))
    with pager.budget.placement.product(noted, more):
        if of_weight:
            yield noted
            return
        with pager.residency.frames_of(noted):
            yield noted


def _noted(weight: PagedTensor, least_frames: int = 1) -> Weight:
    """What is known of ``weight`` in this metered iteration."""
    run, budget = weight._storage.run, weight._storage.pager.budget
    beside = max(_own_dense_bytes(weight), budget.fixed_reserve or 0)
    limit_bytes = run.count * budget.page_size + beside
    return budget.placement.weight(run, limit_bytes, least_frames)


def _own_dense_bytes(weight: PagedTensor) -> int:
    """Of its gradient, where it is whole and wants one. (In evaluation too: the same bits.)"""
    return weight.numel() * weight.dtype.itemsize if weight.requires_grad else 0


def linear_in_slabs(inputs: torch.Tensor, weight: PagedTensor, bias: Any = None) -> Any:
    """``F.linear``, under autocast too; ``NotImplemented`` for what PyTorch has to refuse, or to
    take apart.

    inputs : [..., in_features], plain or paged, of the weight's dtype (or what autocast makes one).
    weight : PagedTensor [out_features, in_features], contiguous; perhaps a view of some rows.
    bias : ``None``, or [out_features], paged or plain.

    Raises ``InfeasibleBudget`` with nothing pinned if not even one block's pages fit.
    """
    if _is_taken_apart() or type(inputs) not in _PLAIN_TYPES:
        return NotImplemented
    if bias is not None and type(bias) not in _PLAIN_TYPES:
        return NotImplemented
    if weight.dim() != 2 or not weight.is_contiguous() or not weight.numel():
        return NotImplemented
    inputs, dtype, bias = _as_autocast_has_it(inputs, weight, bias)
    if not _go_together(inputs, weight, dtype, bias):
        return NotImplemented
    if weight._storage.pager.metering_this():  # whole, all operands are on the device at once
        runs = {t._storage.run for t in (inputs, weight, bias) if type(t) is PagedTensor}
        noted = _noted(weight)
        noted.frames = max(noted.frames, sum(run.count for run in runs))
    flat = _plain(inputs).reshape(-1, weight.size(1))
    one_each = bias is None or tuple(bias.shape) == (weight.size(0),)
    out = product(flat, weight, _plain(bias) if one_each else None)
    out = out.view(*inputs.shape[:-1], weight.size(0))
    return out if one_each else out + bias


def product(x: torch.Tensor, weight: PagedTensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias for plain x [M, K] and bias [N] of one dtype; differentiable, twice."""
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return _Product.apply(x, bias, weight)  # type: ignore[no-any-return,no-untyped-call]
    return _product(x, weight, bias)


def input_grad(grad: torch.Tensor, weight: PagedTensor) -> torch.Tensor:
    """grad @ weight for plain grad [M, N]; differentiable."""
    return _InputGrad.apply(grad, weight)  # type: ignore[no-any-return,no-untyped-call]


# -- what is taken ---------------------------------------------------------------------------------
def _is_taken_apart() -> bool:
    """By something that has to see the ops that a linear is made of."""
    return bool(_functorch_level() is not None or forward_ad._current_level >= 0)


def _as_autocast_has_it(
    inputs: torch.Tensor, weight: PagedTensor, bias: Any
) -> tuple[torch.Tensor, torch.dtype, Any]:
    """Operands as autocast casts them, where it is on. The weight is cast block by block, so only
    its dtype changes here: the second result."""
    kind = weight.device.type
    if not torch.is_autocast_enabled(kind):
        return inputs, weight.dtype, bias
    low = torch.get_autocast_dtype(kind)

    def is_cast(tensor: torch.Tensor) -> bool:
        return tensor.is_floating_point() and tensor.dtype is not torch.float64

    if is_cast(inputs):
        inputs = inputs.to(low)
    if bias is not None and is_cast(bias):
        bias = bias.to(low)
    return inputs, low if is_cast(weight) else weight.dtype, bias


def _go_together(
    inputs: torch.Tensor, weight: PagedTensor, dtype: torch.dtype, bias: torch.Tensor | None
) -> bool:
    """``False`` for operands of no product here. Raises PyTorch's own errors for what it refuses:
    shapes that disagree, and dtypes."""
    if not weight.dtype.is_floating_point or inputs.layout is not torch.strided:
        return False
    if inputs.device != weight.device:
        return False
    linear = torch.nn.functional.linear
    with torch.no_grad():
        out = linear(inputs.new_empty(inputs.size(), device="meta"), _on_meta(weight, inputs.dtype))
        if bias is not None:
            out + bias.new_empty(bias.size(), device="meta")
        if inputs.dtype is dtype and (bias is None or bias.dtype is dtype):
            return True
        cell = torch.ones(1, 1)
        linear(
            cell.to(inputs.dtype), cell.to(dtype), None if bias is None else cell[0].to(bias.dtype)
        )
    return False


def _on_meta(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tensor.size(), dtype=dtype, device="meta")


def _plain(tensor: Any) -> Any:
    return tensor.clone() if type(tensor) is PagedTensor else tensor


# -- the graph -------------------------------------------------------------------------------------
class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, weight: PagedTensor
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        if grad is None:
            return None, None, None
        grad = _plain(grad)
        x, weight = ctx.saved_tensors
        for_x, for_bias, for_weight = ctx.needs_input_grad
        of_bias = grad.sum(0) if for_bias else None
        of_x = input_grad(grad, weight) if for_x else None
        return of_x, of_bias, _WeightGrad.apply(grad, x, weight) if for_weight else None  # type: ignore[no-untyped-call]


class _InputGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, weight: PagedTensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(grad, weight)
        return _input_grad(_plain(grad), weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        if grad is None:
            return None, None
        grad = _plain(grad)
        factor, weight = ctx.saved_tensors
        for_factor, for_weight = ctx.needs_input_grad
        of_factor = product(grad, weight, None) if for_factor else None
        return of_factor, _WeightGrad.apply(factor, grad, weight) if for_weight else None  # type: ignore[no-untyped-call]


class _WeightGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, x: torch.Tensor, weight: PagedTensor) -> PagedTensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(grad, x)
        return _weight_grad(_plain(grad), _plain(x), weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        if grad is None:
            return None, None, None
        factor, x = (_plain(tensor) for tensor in ctx.saved_tensors)
        grad = grad.to(x.dtype)
        for_factor, for_x, _ = ctx.needs_input_grad
        if type(grad) is not PagedTensor or not grad.is_contiguous():
            return x.mm(grad.t()) if for_factor else None, factor.mm(grad) if for_x else None, None
        of_factor = product(x, grad, None) if for_factor else None
        return of_factor, input_grad(factor, grad) if for_x else None, None


# -- the products ----------------------------------------------------------------------------------
def _product(x: torch.Tensor, weight: PagedTensor, bias: torch.Tensor | None) -> torch.Tensor:
    matrix = _Matrix.of(weight)
    out = x.new_empty(x.size(0), matrix.rows)
    direct = matrix.is_read_directly(x)
    if direct:
        x, bias = _contiguous_rows(x), None if bias is None else bias.contiguous()
    with torch.no_grad(), _as_it_is(x), closing(_walk(matrix)) as slabs:
        for slab in slabs:
            if direct:
                linear_forward(x, slab.paged(), out, bias, (slab.first, slab.stop))
                continue
            for first, stop in slab.blocks():
                rows = slab.block(first, stop).to(x.dtype).t()
                if bias is None:
                    torch.mm(x, rows, out=out[:, first:stop])
                else:
                    torch.addmm(bias[first:stop], x, rows, out=out[:, first:stop])
                del rows  # before there is the next one
    return out


def _input_grad(grad: torch.Tensor, weight: PagedTensor) -> torch.Tensor:
    matrix = _Matrix.of(weight)
    wide = torch.float32 if grad.dtype in _HALVES else grad.dtype
    total = grad.new_zeros(grad.size(0), matrix.columns, dtype=wide)
    direct = matrix.is_read_directly(grad)
    grad = _contiguous_rows(grad) if direct else grad
    with torch.no_grad(), _as_it_is(grad), closing(_walk(matrix)) as slabs:
        for slab in slabs:
            if direct:
                span = slab.first, slab.stop
                linear_input_grad(grad, slab.paged(), total, span, accumulate=True)
                continue
            for first, stop in slab.blocks():
                rows, here = slab.block(first, stop), grad[:, first:stop]
                if wide is not grad.dtype and runs_triton(grad.device):  # CUDA alone has it
                    total += torch.mm(here, rows.to(grad.dtype), out_dtype=wide)
                else:
                    total.addmm_(here.to(wide), rows.to(grad.dtype).to(wide))
                del rows
    return total.to(grad.dtype)


def _weight_grad(grad: torch.Tensor, x: torch.Tensor, weight: PagedTensor) -> PagedTensor:
    """In new pages. If they find no room in the tiers (``TierFull``), none of them stays."""
    began = time.perf_counter()
    with torch.no_grad():
        result = new_gradient(weight)
    matrix = _Matrix.of(result)
    direct = matrix.is_read_directly(x)
    if direct:
        grad, x = _contiguous_rows(grad), _contiguous_rows(x)
    with torch.no_grad(), _as_it_is(x), closing(_walk(matrix, write=True)) as slabs:
        for slab in slabs:
            if direct:
                linear_weight_grad(grad, x, slab.paged(), (slab.first, slab.stop))
                continue
            for first, stop in slab.blocks():
                slab.store(first, stop, grad[:, first:stop].t().mm(x))
    pager = result._storage.pager
    if pager.metering_this():
        nbytes = result.numel() * result.dtype.itemsize
        pager.budget.placement.note_gradient(_noted(weight), result._storage, nbytes, began)
    return result


def _as_it_is(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """No autocast: operands have the dtype that they shall have."""
    return torch.autocast(tensor.device.type, enabled=False)


def _contiguous_rows(matrix: torch.Tensor) -> torch.Tensor:
    apart = matrix.size(0) <= 1 or matrix.stride(0) >= matrix.size(1)
    return matrix if apart and matrix.stride(1) == 1 else matrix.contiguous()


# -- rows in pages ---------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class _Matrix:
    """A contiguous matrix in pages: row 0 begins at byte ``begin`` of its run."""

    storage: PagedStorage
    begin: int
    dtype: torch.dtype
    rows: int
    columns: int

    @classmethod
    def of(cls, tensor: PagedTensor) -> _Matrix:
        begin = tensor._storage.offset + int(tensor.storage_offset()) * tensor.dtype.itemsize
        return cls(tensor._storage, begin, tensor.dtype, tensor.size(0), tensor.size(1))

    @property
    def page_bytes(self) -> int:
        return self.storage.pager.page_size

    @property
    def row_bytes(self) -> int:
        return self.columns * self.dtype.itemsize

    @property
    def block_rows(self) -> int:
        return max(1, self.page_bytes // self.row_bytes)

    def byte(self, row: int) -> int:
        return self.begin + row * self.row_bytes

    def pages(self, first: int, stop: int) -> range:
        """Those that hold rows ``first … stop``."""
        size = self.page_bytes
        return range(self.byte(first) // size, -(-self.byte(stop) // size))

    def slabs(self, frames: int) -> Iterator[tuple[int, int]]:
        """Rows ``first … stop`` of each: as many whole blocks as ``frames`` hold, but one at
        least."""
        first, block, size = 0, self.block_rows, self.page_bytes
        while first < self.rows:
            end = (self.byte(first) // size + frames) * size
            whole = (end - self.begin) // self.row_bytes // block * block
            stop = min(self.rows, max(first + block, whole))
            if end >= self.byte(self.rows):
                stop = self.rows
            yield first, stop
            first = stop

    def is_read_directly(self, x: torch.Tensor) -> bool:
        """Whether the kernel on pages multiplies it with ``x``. Decided as if its frames were
        scattered, for its bits should not depend on where they are."""
        if x.dtype is not self.dtype or self.dtype not in DTYPES or self.begin:
            return False
        shape = (x.size(0), self.rows, self.columns)
        return choose(*shape, self.dtype, False, device_type=x.device.type) == "direct"


@dataclass(frozen=True, eq=False)
class _Held:
    """Rows ``first … stop`` of a matrix, in ``frames``, for as long as they are held."""

    matrix: _Matrix
    first: int
    stop: int
    frames: Int32

    def blocks(self) -> Iterator[tuple[int, int]]:
        step = self.matrix.block_rows
        for first in range(self.first, self.stop, step):
            yield first, min(first + step, self.stop)

    def pieces(self, first: int, stop: int) -> list[torch.Tensor]:
        """The bytes of rows ``first … stop``, where they are: one view, or one for each page."""
        matrix, size = self.matrix, self.matrix.page_bytes
        arena = matrix.storage.pager.backend.arena
        low, high = matrix.byte(first), matrix.byte(stop)
        here, pages = matrix.pages(self.first, self.stop), matrix.pages(first, stop)
        frames = self.frames[pages.start - here.start : pages.stop - here.start].tolist()
        if frames == list(range(frames[0], frames[0] + len(frames))):
            start = frames[0] * size + low % size
            return [arena[start : start + high - low]]
        found = []
        for page, frame in zip(pages, frames):
            begin, end = max(low, page * size), min(high, (page + 1) * size)
            start = frame * size + begin % size
            found.append(arena[start : start + end - begin])
        return found

    def block(self, first: int, stop: int) -> torch.Tensor:
        """Rows ``first … stop``: a view of the arena, or a copy as well aligned as a view. Where
        its frames will lie is not known in advance, so a metered iteration takes the copy."""
        matrix, pager = self.matrix, self.matrix.storage.pager
        pieces = self.pieces(first, stop)
        flat = pieces[0]
        if len(pieces) > 1 or (len(matrix.pages(first, stop)) > 1 and pager.metering_this()):
            pager.gathers += 1
            ahead = matrix.byte(first) % pager.backend.alignment
            nbytes = (stop - first) * matrix.row_bytes
            flat = torch.empty(ahead + nbytes, dtype=torch.uint8, device=flat.device)[ahead:]
            torch.cat(pieces, out=flat)
        return flat.view(matrix.dtype).view(stop - first, matrix.columns)

    def store(self, first: int, stop: int, values: torch.Tensor) -> None:
        """Write rows ``first … stop``."""
        flat = values.to(self.matrix.dtype).reshape(-1).view(torch.uint8)
        pieces = self.pieces(first, stop)
        sizes = [piece.numel() for piece in pieces]
        for piece, part in zip(pieces, flat.split(sizes)):
            piece.copy_(part)

    def paged(self) -> PagedMatrix:
        """For kernels, which read and write nothing but the pages that are held."""
        matrix, pager = self.matrix, self.matrix.storage.pager
        pages = len(matrix.pages(0, matrix.rows))
        with pager.lock:
            frames = pager.table.device_frames(matrix.storage.run.first, pages)
        arena = pager.residency.arena
        shape = (matrix.dtype, matrix.rows, matrix.columns)
        return PagedMatrix(arena, frames, pager.page_size, *shape)


def _walk(matrix: _Matrix, *, write: bool = False) -> Generator[_Held, None, None]:
    """One slab after another; each is held until the next is asked for."""
    storage = matrix.storage
    spans = list(matrix.slabs(fair_share(storage.pager)))
    wanted = ([pages_of(storage, matrix.pages(*span), write=write)] for span in spans)
    with closing(stream(storage.pager, wanted, noted=True)) as pinned:
        for (first, stop), (frames,) in zip(spans, pinned):
            yield _Held(matrix, first, stop, frames)
