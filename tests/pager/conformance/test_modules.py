"""Every module of PyTorch's database with paged parameters: outputs, gradients and buffers."""

from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch
from torch.testing._internal.common_modules import FunctionInput, ModuleInfo, module_db
from torch.utils._pytree import tree_map

from .lanes import FULL, INFERENCE, LANES, OPEN, SAVED
from .left_out import LAZY_MODULE
from .test_backward import backward
from .trials import SEED, Call, Trials, seed
from .worlds import World

pytestmark = pytest.mark.filterwarnings("ignore")


def _params() -> Iterator[pytest.param]:
    for info in module_db:
        modes = (True, False) if info.train_and_eval_differ else (True,)
        for training in modes:
            mode = "train" if training else "eval"
            yield pytest.param(info, training, id=f"{info.name}-{mode}")


@pytest.mark.parametrize(("info", "training"), list(_params()))
def test_module(info: ModuleInfo, training: bool, pager, tally) -> None:
    if info.is_lazy:
        tally["modules", "", "float32", "left out", f"{LAZY_MODULE}: {info.name}"] += 1
        with pytest.raises(TypeError, match="lazy"):
            pager.page_module(_lazy(info))
        return
    trials = Trials(pager, tally, "modules", f"{info.name}.{training=}", "float32")
    trials.lanes = (*LANES, SAVED, OPEN)
    if FULL or not training:
        trials.lanes = (*trials.lanes, INFERENCE)
    trials.compare(_samples(info, training), quick=2, full=None)


def _lazy(info: ModuleInfo) -> torch.nn.Module:
    sample = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=False, training=True
    )[0]
    given = sample.constructor_input
    return info.module_cls(*given.args, **given.kwargs)


def _samples(info: ModuleInfo, training: bool) -> Iterator[tuple[object, Call]]:
    """Each input twice: as it is, which is how models are used, and in pages."""
    seed(SEED)
    for sample in info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
    ):
        if sample.forward_input is None:
            continue
        plain, paged = (
            _call(info, training, sample.constructor_input, inputs)
            for inputs in (sample.forward_input, None)
        )
        yield None, plain
        yield (sample.forward_input.args, sample.forward_input.kwargs), paged


def _call(
    info: ModuleInfo, training: bool, constructor: FunctionInput, inputs: FunctionInput | None
) -> Call:
    """Forward and backward on ``inputs``, or on those of the world if None."""

    def call(world: World) -> object:
        if inputs is None:
            args, kwargs = world.inputs
            leaves = world.leaves
        else:
            leaves = []
            args, kwargs = tree_map(lambda x: _copy(x, leaves), (inputs.args, inputs.kwargs))
        given = deepcopy((constructor.args, constructor.kwargs))
        with torch.inference_mode(False):  # as a model is made before it is used
            module = info.module_cls(*given[0], **given[1])
            module = world.page_module(module.to(torch.float32).train(training))
        result = module(*args, **kwargs)
        backward(result)
        return {
            "result": result,
            "parameters": dict(module.named_parameters()),
            "gradients": {name: p.grad for name, p in module.named_parameters()},
            "input gradients": [leaf.grad for leaf in leaves],
            "buffers": dict(module.named_buffers()),
        }

    return call


def _copy(value: object, leaves: list[torch.Tensor]) -> object:
    if not isinstance(value, torch.Tensor):
        return deepcopy(value)
    copy = value.detach().clone().requires_grad_(value.requires_grad)
    if copy.requires_grad:
        leaves.append(copy)
    return copy
