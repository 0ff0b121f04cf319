"""Gradients of paged leaves, through every op of the database that has them."""

import pytest
import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from tensorpager.pager.tensor.open_weights import TAKE_OPEN

from .lanes import FULL, LANES, LENT, OPEN, SAVED
from .left_out import OTHER_ORDER
from .ops import dtype_name, full_limit, inputs_of, op_params, samples
from .trials import Call, Trials, seed, tensors
from .worlds import World

# In full runs all samples of grid_sampler_3d in five lanes take more than 15 minutes if it is busy.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(3600)]

TAKE_OPEN_NAMES = {func.__name__ for func in TAKE_OPEN}


@pytest.mark.parametrize(
    ("op", "dtype"), op_params(lambda op: op.supports_autograd, (torch.float32,))
)
def test_backward(op: OpInfo, dtype: torch.dtype, pager, tally) -> None:
    bound = OTHER_ORDER.get(op.name)
    trials = Trials(pager, tally, "backward", op.full_name, dtype_name(dtype), bound=bound)
    trials.lanes = (*LANES, LENT, SAVED)
    if FULL or op.name.rpartition(".")[2] in TAKE_OPEN_NAMES:
        trials.lanes = (*trials.lanes, OPEN)
    trials.compare(
        (
            (inputs_of(sample), _gradients_of(op, sample))
            for sample in samples(op, dtype, requires_grad=True)
        ),
        quick=1,
        full=full_limit(dtype),
    )


def _gradients_of(op: OpInfo, sample: SampleInput) -> Call:
    def call(world: World) -> object:
        value, args, kwargs = world.inputs
        result = sample.output_process_fn_grad(op(value, *args, **kwargs))
        backward(result)
        return result, [leaf.grad for leaf in world.leaves]

    return call


def backward(result: object) -> None:
    """Backpropagate random gradients, the same for the same shapes, from all of ``result``."""
    roots = [tensor for tensor in tensors(result) if tensor.requires_grad]
    seed(1)
    gradients = [torch.randn(root.shape, dtype=root.dtype) for root in roots]
    if roots:
        torch.autograd.backward(roots, gradients)
