"""One training iteration of a model that need not fit, seen without running it.

Tensors are fake: they have shapes and no bytes (``FakeTensorMode``). The log that records plain
PyTorch (``plain_script.py``) records them as well, so the trace is that of a recording on the CPU.
How long an op takes is a roofline: its floating-point operations, by PyTorch's own formulas, over
what the device reaches, or its bytes over the memory's rate, whichever is more.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.flop_counter import flop_registry

from ...planner.hardware import Compute
from ...planner.trace import Trace
from ..errors import PagerError
from .plain_script import IterationLog

SOURCE = "tensorpager estimate"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "adam": lambda parameters: torch.optim.Adam(parameters, foreach=False),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
}
aten = torch.ops.aten


def _grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, *_: Any, **__: Any
) -> torch.Tensor:
    """What the op returns, which PyTorch itself knows for bfloat16 only."""
    if a.dim() == b.dim():
        groups = a.shape[0] if offs is None else offs.shape[0]
        return a.new_empty(groups, a.shape[-2], b.shape[-1])
    return a.new_empty(a.shape[-2], b.shape[-1])


def _grouped_mm_flops(a: torch.Tensor, b: torch.Tensor, *_: Any) -> int:
    """Of all groups together: of two matrices, one is cut into them by its rows or columns."""
    rows, columns = a.shape[-2], b.shape[-1]
    groups = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return 2 * groups * rows * b.shape[-2] * columns


def _lstm_flops(times: int, inputs: torch.Tensor, *weights: Any) -> int:
    """``times``: of floating-point operations for a number of both matrices, at each step."""
    steps = inputs.shape[0] * inputs.shape[1]
    return int(times * steps * (weights[0].numel() + weights[1].numel()))


def _reserve(inputs: torch.Tensor, hidden: int) -> torch.Tensor:
    """What a layer of an LSTM keeps for its backward pass, of which PyTorch says that it is empty.
    Measured on the CPU, in bytes: 36 for each of ``hidden``, 26 for the wider of both sides."""
    nbytes = 36 * hidden + 26 * max(hidden, inputs.shape[-1])
    return torch.empty(inputs.shape[0] * inputs.shape[1] * nbytes, dtype=torch.uint8)


# What PyTorch has no formula for, by the op's operands.
FLOPS: dict[Any, Callable[..., int]] = {
    aten._grouped_mm: _grouped_mm_flops,
    aten.mkldnn_rnn_layer: partial(_lstm_flops, 2),
    aten.mkldnn_rnn_layer_backward: partial(_lstm_flops, 4),
}
# The CPU's attention does what the GPU's does, and has no formula of its own.
SAME_FLOPS = {
    aten._scaled_dot_product_flash_attention_for_cpu: (
        aten._scaled_dot_product_flash_attention, 3,
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward, 4,
    ),
}  # fmt: skip


# -- the model -----------------------------------------------------------------------------------
@dataclass
class Training:
    """A model and what it is given in an iteration, all fake. ``call`` gives the loss."""

    name: str
    module: torch.nn.Module
    call: Callable[[], torch.Tensor]
    tokens: int  # of an iteration; samples where the model has none
    unit: str = "tokens"


def training_of_hf(path: Path, batch: int, seq: int, dtype: str | None) -> Training:
    """The model of tokens that a Hugging Face configuration describes: of the class that it names
    in ``architectures``, or else a language model. Within a fake mode."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise PagerError(f"--hf {path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise PagerError(f"--hf {path}: not JSON ({error}); it is a model's config.json") from error
    kind = content.get("model_type") if isinstance(content, dict) else None
    if not isinstance(kind, str):
        raise PagerError(
            f"--hf {path}: no Hugging Face configuration, which has a model_type; for another "
            "model write FILE.py:function"
        )
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        raise PagerError(
            f"--hf needs transformers: pip install 'tensorpager[hf]' ({error})"
        ) from error
    try:
        config = CONFIG_MAPPING[kind].from_json_file(path) if kind in CONFIG_MAPPING else None
        model, inputs = _model_of(config)
        if model is None or model.main_input_name != "input_ids":
            raise PagerError(
                f"--hf {path}: transformers has no model of tokens of model_type {kind!r}, the "
                "only kind that is known here; write FILE.py:function with a function that returns "
                "the module and its inputs"
            )
        wanted = DTYPES.get(dtype or "", torch.float32 if dtype else None)
        with torch.device("meta"):  # there no weight gets its first values, some by looking at them
            module = model._from_config(
                config, dtype=wanted or getattr(config, "dtype", None) or torch.float32
            )
        _fake_parameters(module, None)
    except PagerError:
        raise
    except Exception as error:
        raise PagerError(f"--hf {path}: transformers refuses it: {_line(error)}") from error
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and 0 < longest < seq:  # XLNet says −1: it has no end
        raise PagerError(
            f"--seq {seq} is more than the {longest} positions of {path}; lower --seq, or raise "
            "max_position_embeddings"
        )
    tokens = torch.zeros(batch, seq, dtype=torch.int64)
    given = dict.fromkeys(inputs, tokens)
    name = f"{type(module).__name__} of {path}"
    return Training(name, module, lambda: _loss(name, module(**given), tokens), batch * seq)


def _model_of(config: Any) -> tuple[Any, tuple[str, ...]]:
    """The class of a model, None where there is none, and by which names it takes tokens."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    both = ("input_ids", "labels")
    families = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM")
    for name in getattr(config, "architectures", None) or ():
        model = getattr(transformers, str(name), None)
        if isinstance(model, type) and issubclass(model, transformers.PreTrainedModel):
            names = [getattr(auto, f"MODEL_FOR_{family}_MAPPING_NAMES") for family in families]
            return model, both if any(name in known.values() for known in names) else both[:1]
    for family in families:
        models = getattr(auto, f"MODEL_FOR_{family}_MAPPING")
        if type(config) in models:
            return models[type(config)], both
    return None, ()


def training_of_function(target: str, batch: int, seq: int | None, dtype: str | None) -> Training:
    """What ``FILE.py:function`` returns: a module, or a module and its inputs. Within a fake mode.

    The loss is what the module returns if that is one number, its ``loss`` if there is one, the
    cross entropy of logits that tokens were given for, and otherwise the mean of the squares.
    """
    made = _called(target)
    module, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, torch.nn.Module):
        raise PagerError(
            f"{target} returned {type(made).__name__}; it returns a torch.nn.Module, or a module "
            "and a tuple or dict of its inputs"
        )
    wanted = DTYPES[dtype] if dtype is not None else None
    _fake_parameters(module, wanted)
    if inputs is None:
        inputs = _inputs(target, module, batch, seq)
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if isinstance(inputs, dict):
        inputs = {name: _fake_of(value, wanted) for name, value in inputs.items()}
    else:
        inputs = tuple(_fake_of(value, wanted) for value in inputs)
    first = next(iter(inputs.values() if isinstance(inputs, dict) else inputs), None)
    has_tokens = isinstance(first, torch.Tensor) and not first.is_floating_point()

    def call() -> torch.Tensor:
        output = module(**inputs) if isinstance(inputs, dict) else module(*inputs)
        return _loss(target, output, first if has_tokens else None)

    count = first.numel() if has_tokens and first is not None else batch
    return Training(target, module, call, count, "tokens" if has_tokens else "samples")


def _called(target: str) -> Any:
    path, _, function = target.rpartition(":")
    if not path.endswith(".py") or not function.isidentifier():
        raise PagerError(f"{target}: write FILE.py:function, or --hf CONFIG.json")
    if not Path(path).is_file():
        raise PagerError(f"{target}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).parent.absolute()))
    try:
        sys.modules[spec.name] = loaded
        spec.loader.exec_module(loaded)
        found = getattr(loaded, function, None)
        if not callable(found):
            raise PagerError(f"{target}: {path} has no function {function}")
        return found()
    except PagerError:
        raise
    except Exception as error:
        raise PagerError(f"{target} failed: {_line(error)}") from error
    finally:
        sys.path.pop(0)


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or "no reason given"
    return f"{type(error).__name__}: {text[:300]}"


def _fake_parameters(module: torch.nn.Module, dtype: torch.dtype | None) -> None:
    """Fake parameters and buffers of the CPU, in ``dtype``, in place of those of the meta device or
    of another dtype; what is shared stays shared."""
    made: dict[int, torch.Tensor] = {}

    def instead(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            new = _fake_of(tensor.detach(), dtype)
            if isinstance(tensor, torch.nn.Parameter):
                new = torch.nn.Parameter(new, requires_grad=tensor.requires_grad)
            made[id(tensor)] = new
        return made[id(tensor)]

    for inner in module.modules():
        for held in (inner._parameters, inner._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = instead(tensor)  # type: ignore[assignment]


def _fake_of(value: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
    if value.device.type == "cpu" and value.dtype is wanted:
        return value
    return torch.empty_like(value, device="cpu", dtype=wanted)


def _inputs(target: str, module: torch.nn.Module, batch: int, seq: int | None) -> Any:
    """Tokens where there is an embedding, and features for a first linear layer."""
    for inner in module.modules():
        if isinstance(inner, torch.nn.Embedding):
            return torch.zeros(batch, seq or 1, dtype=torch.int64)
        if isinstance(inner, torch.nn.Linear):
            shape = (batch, inner.in_features) if seq is None else (batch, seq, inner.in_features)
            return torch.zeros(shape, dtype=inner.weight.dtype)
    raise PagerError(
        f"{target}: what the module takes cannot be guessed without an Embedding or a Linear; let "
        "the function return the module and a tuple of its inputs"
    )


def _loss(target: str, output: Any, tokens: torch.Tensor | None) -> torch.Tensor:
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    if isinstance(output, dict):
        output = tuple(output.values())
    if isinstance(output, tuple | list) and output:
        output = output[0]
    if not isinstance(output, torch.Tensor):
        raise PagerError(
            f"{target}: its module returned {type(output).__name__}; it returns a tensor, or "
            "something with a loss"
        )
    if output.numel() == 1:
        return output.squeeze()
    if tokens is not None and output.dim() == 3 and output.shape[:2] == tokens.shape:
        return torch.nn.functional.cross_entropy(output.flatten(0, 1).float(), tokens.flatten())
    return output.float().square().mean()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


# -- the run -------------------------------------------------------------------------------------
# What ops allocate inside and give back, which a run with fake tensors cannot see, as a share of
# their operands' bytes, in 32 and in 16 bits, and what takes a few megabytes at most. Measured on
# the CPU (tests/pager/test_estimate.py does it again). Elementwise ops need nothing.
WORKSPACES = {
    "logsumexp": (1.0, 1.0),
    "native_dropout": (1.0, 1.0),
    "mean": (0.0, 2.0),
    "mse_loss": (0.5, 1.5),
    "_fused_rms_norm": (1.0, 5.0),
    "convolution": (1.9, 1.9),
    "convolution_backward": (1.0, 1.3),
    "scatter": (0.0, 2.0),
    "scatter_": (0.0, 2.0),
    "scatter_add": (0.0, 2.0),
    "scatter_add_": (0.0, 2.0),
    "_safe_softmax": (0.25, 0.5),
}
NOTHING_INSIDE = frozenset(
    """
    mm addmm bmm baddbmm _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data
    nll_loss_forward nll_loss_backward embedding embedding_dense_backward native_layer_norm
    native_layer_norm_backward sum amax cat stack clone _to_copy index index_select gather
    slice_backward select_backward constant_pad_nd cumsum topk sort argmax linalg_vector_norm norm
    _scaled_dot_product_flash_attention_for_cpu native_batch_norm max_pool2d_with_indices
    _scaled_dot_product_flash_attention_for_cpu_backward _adaptive_avg_pool2d repeat tril copy_
    mse_loss_backward zeros ones full empty new_ones new_zeros new_full ones_like zeros_like
    full_like empty_like arange scalar_tensor lift_fresh _local_scalar_dense _unsafe_view view
    detach alias is_nonzero all any _reshape_alias fill_ zero_ new_empty new_empty_strided rand
    rand_like bernoulli_ uniform_ normal_ softplus_backward masked_fill masked_fill_ triu flip roll
    index_put index_put_ index_add index_add_ floor_divide histc native_group_norm avg_pool2d
    _grouped_mm
    """.split()  # noqa: SIM905
)


class _Log(IterationLog):
    """Of fake tensors: ops take what a device would take for them."""

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.flops = 0
        self.unknown: Counter[str] = Counter()  # ops that may allocate inside → how often
        self.taken_false: Counter[str] = Counter()  # modules that asked for a value → how often
        self._compute = compute

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func._overloadpacket is aten._grouped_mm and args[0].dtype is not torch.bfloat16:
            return _grouped_mm(*args, **kwargs)
        try:
            result = super().run(func, args, kwargs)
            if func._overloadpacket is aten.mkldnn_rnn_layer:
                result = (*result[:3], _reserve(args[0], args[10]))
            return result
        except DataDependentOutputException:
            if func is not aten._local_scalar_dense.default or args[0].dtype is not torch.bool:
                raise
            # What a model asks for is mostly an exception: to drop a layer, to mend what is not
            # finite, attention from some tokens to all.
            self.taken_false[self._modules[-1][1] if self._modules else ""] += 1
            return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        ops = len(self.durations)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.durations) > ops:
            self.durations[-1] = self._seconds(func, args, kwargs or {}, result)
        return result

    def _seconds(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> float:
        if func.is_view:
            return 0.0
        results = list(_tensors(result))
        operands = [*_tensors(list(args)), *_tensors(list(kwargs.values()))]
        # The first operand's: attention in 16 bits has sums in 32 among the others.
        wide = next((t.itemsize for t in operands if t.is_floating_point()), 4)
        self._look_inside(func, wide > 2, operands)
        flops = _flops(func, args, kwargs, result)
        self.flops += flops
        nbytes = sum(t.numel() * t.itemsize for t in (*operands, *results))
        return self._compute.seconds(flops, nbytes, wide)

    def update_us(self, us: float, nbytes: int) -> float:
        return 1e6 * self._compute.seconds(0, nbytes, 4)

    def _look_inside(self, func: Any, wide: bool, operands: list[torch.Tensor]) -> None:
        name = func._schema.name.removeprefix("aten::")
        if name in WORKSPACES:
            share = WORKSPACES[name][0 if wide else 1]
            nbytes = int(share * sum(t.numel() * t.itemsize for t in operands))
            if nbytes:
                # One more that the op makes.
                space = self._used([torch.empty(nbytes, dtype=torch.uint8)], len(self._noted) - 1)
                self._noted[-1][3].extend(space)
                self.kinds[space[0]] = "workspace"
        elif name not in NOTHING_INSIDE and torch.Tag.pointwise not in func.tags:
            self.unknown[func._schema.name] += 1


def _flops(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    packet = func._overloadpacket
    if packet in FLOPS:
        return FLOPS[packet](*args)
    if packet in SAME_FLOPS:
        packet, count = SAME_FLOPS[packet]
        *before, query, key, value = args[:count]
        # Before 2.13 PyTorch counts only for as many heads of keys as of queries.
        args, kwargs = (*before, query, _of_heads(key, query), _of_heads(value, query)), {}
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def _of_heads(keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Of a shape as if there was a head for each of the queries."""
    return keys[:, :1].expand(-1, queries.shape[1], -1, -1)


@contextmanager
def fake() -> Iterator[None]:
    """Tensors made inside have no bytes."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"):
        yield


@dataclass(frozen=True)
class Iteration:
    """``trace`` of version 2; ``flops`` of it; ``unknown``: ops that may allocate inside what is
    not in the trace, and how often they run; ``taken_false``: modules that asked whether something
    holds for values that there are not, and how often: it was said not to."""

    trace: Trace
    flops: int
    unknown: dict[str, int]
    taken_false: dict[str, int]


def _step(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
    optimizer.step()


def fake_iteration(
    training: Training,
    optimizer: str,
    compute: Compute,
    host_bytes_per_s: float,
    *,
    autocast: bool = False,
    overlap: bool = False,
    clip: bool = False,
    batches: int = 1,
) -> Iteration:
    """An iteration that is not the first one: the optimizer has its states. Within a fake mode.

    ``overlap``: each parameter is updated right after its gradient is there. ``clip``: gradients
    are scaled by the norm of all of them before the step, so it is at the end. ``batches``: of
    which gradients are added up before it.

    Raises ``PagerError`` if the model cannot run without values, has nothing to train, or is to do
    ``overlap`` with one of the others."""
    if overlap and (clip or batches > 1):
        raise PagerError(
            "updates in the backward pass cannot wait for the norm, or for other batches: overlap, "
            "or clip and accumulate"
        )
    parameters = [p for p in training.module.parameters() if p.requires_grad]
    if not parameters:
        raise PagerError(f"{training.name} has no parameter that is trained")
    together = [[p] for p in parameters] if overlap else [parameters]
    made = [OPTIMIZERS[optimizer](some) for some in together]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    training.module.train()
    log = _Log(compute)
    hooks: list[Any] = []
    try:
        for one in made:
            one.step()
        log.start()
        hooks.append(register_optimizer_step_post_hook(lambda *_: log.step_ended()))
        for one, some in zip(made, together) if overlap else ():
            step = partial(_step, one)
            hooks += [p.register_post_accumulate_grad_hook(step) for p in some]
        try:
            for one in made:
                one.zero_grad()
            for _ in range(batches):
                with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                    loss = training.call()
                (loss / batches if batches > 1 else loss).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=False)
            for one in () if overlap else made:
                one.step()
        finally:
            for hook in hooks:
                hook.remove()
            log.stop()
        trace = log.trace(
            host_bytes_per_s=host_bytes_per_s,
            source=SOURCE,
            device="estimated",  # durations are not the CPU's
            metadata={"models": [type(training.module).__name__], "flops": log.flops},
        )
    except PagerError:
        raise
    except Exception as error:
        raise PagerError(
            f"{training.name} cannot be run with tensors that have no values: {_line(error)}; "
            "'tensorpager record' records a real run"
        ) from error
    return Iteration(trace, log.flops, dict(log.unknown), dict(log.taken_false))
