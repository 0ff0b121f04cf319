"""All page kernels as PyTorch ops, ``torch.ops.tensorpager.*``, from when this module is imported.

The door for users of `torch.compile`, `make_fx` and autograd: the ops have schemas that say what is
written, fake implementations, and derivatives where there are any; `torch.library.opcheck` holds.
The runtime calls the launchers themselves, since the dispatcher costs time.

======================  ===========================================================================
`ops_copy`              gather_pages, gather_pages_into, scatter_pages, move_pages, slide_pages,
                        fill_pages, page_checksums
`ops_elementwise`       elementwise, reduce, total_norm, non_finite_check_and_unscale
`ops_optim`             adam_step, sgd_step, quantize, dequantize
`ops_linear`            linear, linear_input_grad (both differentiable), linear_into,
                        linear_input_grad_into, linear_weight_grad
`ops_rows`              gather_rows, group_rows, sum_rows, add_rows, softmax_update, softmax_grad
======================  ===========================================================================

`ops_define` says how lists of operands are passed. Shapes, dtypes, streams and errors are those of
the launcher of the same name. An op without a derivative raises RuntimeError if grad mode is on and
an input requires a gradient.

Backends that do not undo functionalisation ("aot_eager") copy the arena at each op that writes into
it. Inductor writes in place.
"""

from __future__ import annotations

from . import ops_copy, ops_elementwise, ops_linear, ops_optim, ops_rows  # noqa: F401
from .ops_define import encoded

__all__ = ["encoded"]
