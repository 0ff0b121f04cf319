"""Every op of PyTorch's database on paged inputs: the same bits, and the same aliasing."""

import pytest
import torch
from torch.testing._internal.opinfo.core import OpInfo

from .left_out import UNINITIALISED
from .ops import dtype_name, full_limit, inputs_of, op_params, samples
from .trials import Trials, tensors
from .worlds import World

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(("op", "dtype"), op_params(lambda op: True))
def test_forward(op: OpInfo, dtype: torch.dtype, pager, tally) -> None:
    def call(world: World) -> object:
        value, args, kwargs = world.inputs
        return op(value, *args, **kwargs)

    trials = Trials(
        pager,
        tally,
        "forward",
        op.full_name,
        dtype_name(dtype),
        left_out=UNINITIALISED.get(op.full_name),
        after=overwrite,
    )
    trials.compare(
        ((inputs_of(sample), call) for sample in samples(op, dtype)),
        quick=1,
        full=full_limit(dtype),
    )


def overwrite(result: object) -> None:
    """Write into the result: the inputs change exactly where it is a view of them."""
    for tensor in tensors(result):
        tensor.fill_(1)
