"""In-place and out= variants: the paged tensor itself holds the result afterwards."""

from collections.abc import Iterator

import pytest
import torch
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_leaves, tree_map

from .left_out import UNINITIALISED
from .ops import dtype_name, full_limit, inputs_of, op_params, samples
from .trials import Call, Trials
from .worlds import World

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(("op", "dtype"), op_params(lambda op: op.get_inplace()))
def test_inplace(op: OpInfo, dtype: torch.dtype, pager, tally) -> None:
    inplace = op.get_inplace()

    def call(world: World) -> object:
        value, args, kwargs = world.inputs
        result = inplace(value, *args, **kwargs)
        return result, result is value

    trials = Trials(pager, tally, "in-place", op.full_name, dtype_name(dtype))
    trials.compare(
        ((inputs_of(sample), call) for sample in samples(op, dtype)),
        quick=0,  # without pressure the forward suite runs the same ops
        full=full_limit(dtype),
    )


@pytest.mark.parametrize(("op", "dtype"), op_params(lambda op: op.supports_out))
def test_out(op: OpInfo, dtype: torch.dtype, pager, tally) -> None:
    trials = Trials(
        pager,
        tally,
        "out=",
        op.full_name,
        dtype_name(dtype),
        left_out=UNINITIALISED.get(op.full_name),
    )
    trials.compare(_out_samples(op, dtype), quick=0, full=full_limit(dtype))


def _out_samples(op: OpInfo, dtype: torch.dtype) -> Iterator[tuple[object, Call]]:
    """The samples with a filled ``out`` of the right shape beside the inputs."""

    def call(world: World) -> object:
        (value, args, kwargs), out = world.inputs
        result = op(value, *args, **kwargs, out=out)
        return result, [a is b for a, b in zip(tree_leaves(result), tree_leaves(out))]

    for sample in samples(op, dtype):
        try:
            result = op(sample.input, *sample.args, **sample.kwargs)
        except Exception:
            continue
        yield (inputs_of(sample), tree_map(_filled_like, result)), call


def _filled_like(part: object) -> torch.Tensor:
    """Something to write over. Ops whose result is no tensor refuse it, in both worlds."""
    return torch.full_like(part, 1) if isinstance(part, torch.Tensor) else torch.ones(())
