"""The op database in ``torch.inference_mode()``, where composite ops reach the dispatcher whole.

Of many composites the schema says that the result may alias an operand, and they copy where they
must. After each op all that is not pinned is evicted and its frames are poisoned, so that a result
that lies in pages by mistake shows at once. Modules: ``test_modules.py``.
"""

from collections.abc import Iterator

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

from .lanes import FULL, INFERENCE
from .left_out import UNINITIALISED
from .ops import DTYPES, dtype_name, full_limit, inputs_of, samples
from .test_forward import overwrite
from .trials import Trials, known_memory
from .worlds import World

pytestmark = pytest.mark.filterwarnings("ignore")

# Composites of all sorts: what may alias or copy, what is cast, random, complex, a product, a norm.
QUICK = frozenset(
    {
        "H", "T", "adjoint", "atleast_2d", "bfloat16", "block_diag", "broadcast_to", "chunk",
        "column_stack", "contiguous", "diff", "double", "einsum", "expand_as", "fft.hfftn",
        "fft.rfft2", "flatten", "half", "hsplit", "int", "kron", "linalg.multi_dot",
        "linalg.norm", "mT", "matmul", "meshgrid", "movedim", "narrow",
        "nn.functional.batch_norm", "nn.functional.conv2d", "nn.functional.dropout",
        "nn.functional.interpolate", "nn.functional.linear", "nn.functional.layer_norm",
        "nn.functional.scaled_dot_product_attention", "nn.functional.upsample_bilinear",
        "outer", "ravel", "real", "repeat_interleave", "reshape", "reshape_as", "resolve_conj",
        "resolve_neg", "stft", "swapaxes", "take_along_dim", "tensor_split", "to", "type_as",
        "unflatten", "view_as", "where",
    }
)  # fmt: skip
_MOST = 6  # samples of one op in a quick run


def _params() -> Iterator[pytest.param]:
    for op in op_db:
        for index, dtype in enumerate(d for d in DTYPES if d in op.supported_dtypes("cpu")):
            marks = () if op.name in QUICK and not index else (pytest.mark.slow,)
            yield pytest.param(op, dtype, id=f"{op.full_name}-{dtype_name(dtype)}", marks=marks)


@pytest.mark.parametrize(("op", "dtype"), list(_params()))
def test_forward(op: OpInfo, dtype: torch.dtype, pager, tally) -> None:
    def call(world: World) -> object:
        value, args, kwargs = world.inputs
        return op(value, *args, **kwargs)

    trials = Trials(
        pager,
        tally,
        "inference",
        op.full_name,
        dtype_name(dtype),
        left_out=UNINITIALISED.get(op.full_name),
        after=overwrite,
    )
    limit = full_limit(dtype) if FULL else _MOST
    for index, sample in enumerate(samples(op, dtype)):
        if limit is not None and index >= limit:
            break
        with known_memory(op.full_name):
            trials.compare_one(index, INFERENCE, inputs_of(sample), call)
    trials.finish()
