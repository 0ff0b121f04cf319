"""Blocks of a model that run again in backward instead of having their activations stored.

::

    forward:   a block begins: its inputs go into pages -> it runs, and what autograd would store
               is dropped: a :class:`_Later` stands for each of these tensors
    backward:  the first _Later that is asked for: the block runs again, as it ran before, up to
               the last tensor that is wanted; what autograd saves now is stored, and found there

A *segment* is one call of a block: of the outermost modules of which a model has several of one
class beside each other, such as the layers of a transformer. Which blocks run again is said before
an iteration begins (``begin``); calls of the others are told to who plans.

Not every block gives the same bits when it runs again. As the first calls of each one are watched,
those that change something are found (``refused`` says what): an argument in place, a buffer (the
running statistics of a BatchNorm), an attribute, Python's or NumPy's random numbers; and those that
are given what cannot be kept. Of transformers' cache, which a model in training fills and nobody
reads, a block that runs again gets one as it found it, without contents. PyTorch's random numbers
and autocast are set as they were. What a block changes elsewhere, in a global variable say, nobody
sees.
"""

from __future__ import annotations

import copy
import random
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..errors import PagerError
from .activations import SavedTensors, unpack
from .lending import InPages
from .names import named_models
from .paged_tensor import Form, PagedTensor, plain_copy
from .tensor_bytes import array_of

if TYPE_CHECKING:
    from ..core import Core
    from ..memory.space import Extent

_WATCHED = 4  # calls of a block: the first ones may fill caches that later ones only read
_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")  # of caches
_LARGE = 1 << 20  # bytes of a buffer that is not read to see whether it has changed
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class Listener(Protocol):
    """Who plans: told of each segment that does not run again, where it begins and ends."""

    def segment_begins(self, block: str, inputs: Sequence[Extent]) -> None: ...
    def segment_ended(self) -> None: ...


class Segments:
    """Of one pager. ``refused``: block, by its path in the model, → why it may not run again.
    ``reruns``, ``nbytes``, ``seconds``: segments that ran again, what was stored then, and how long
    that took on the host."""

    def __init__(self, pager: Core, saved: SavedTensors) -> None:
        self.refused: dict[str, str] = {}
        self.reruns = self.nbytes = 0
        self.seconds = 0.0
        self.listener: Listener | None = None
        self._pager, self._saved = pager, saved
        self._blocks: dict[int, tuple[weakref.ref[torch.nn.Module], str]] = {}
        self._handles: list[Any] = []
        self._calls: Counter[str] = Counter()  # watched so far
        self._watch: _Watch | None = None
        self._kept: Any = None  # inputs, until their segment has ended
        self._now: Any = None  # the block that runs

    # -- an iteration ----------------------------------------------------------------------------
    def begin(self, chosen: frozenset[str]) -> None:
        """In an iteration that begins now, blocks called ``chosen`` run again."""
        self.end()
        self._saved.again = chosen
        self._blocks = {}
        enter, leave = (_Hook(weakref.WeakMethod(call)) for call in (self._enter, self._leave))
        for prefix, model in named_models(self._pager):
            for path, block in repeated(model, prefix):
                self._blocks.setdefault(id(block), (weakref.ref(block), path))
                # Hooks for the time of the iteration: whoever copies or saves a model between
                # iterations finds none. The last before, and the first after the block's own.
                before = block.register_forward_pre_hook(enter, with_kwargs=True)
                after = block.register_forward_hook(
                    leave, prepend=True, with_kwargs=True, always_call=True
                )
                self._handles += [before, after]

    def end(self) -> None:
        """The iteration is over."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._ended()

    def _ended(self) -> None:
        """A segment is over, however."""
        self._now = self._watch = self._kept = None
        self._saved.segment = None

    # -- a call of a block -----------------------------------------------------------------------
    def _enter(self, block: torch.nn.Module, args: Any, kwargs: Any) -> None:
        known = self._blocks.get(id(block))
        if known is None or known[0]() is not block:  # a copy of one
            return
        saved, path = self._saved, known[1]
        if self._now is not None or not (
            torch.is_grad_enabled() and self._pager.in_iteration() and saved.are_asked()
        ):
            return
        if get_eval_frame_callback() not in (
            None,
            False,
        ):  # what is compiled there would run as it is here
            self.refused[path] = "runs inside of torch.compile"
            return
        values, spec = tree_flatten((args, kwargs))
        reason = next((said for value in values if (said := self._cannot_keep(value))), None)
        if reason is not None:
            self.refused[path] = reason
            return
        self._now = block
        inputs = [_Input(saved, value) for value in values]
        if path in saved.again:
            saved.segment = _Segment(self, path, block, inputs, spec)
        elif self._calls[path] < _WATCHED:
            self._calls[path] += 1
            self._watch = _Watch(path, block, values)
        if self.listener is not None:
            self._kept = inputs
            self.listener.segment_begins(path, [run for each in inputs for run in each.runs])

    def _leave(self, block: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._now is not block:
            return
        watch = self._watch
        if watch is not None:
            reason = watch.changed()
            if reason is None:
                self.refused.pop(watch.path, None)
            else:
                self.refused[watch.path] = reason
        if self._kept is not None and self.listener is not None:
            self.listener.segment_ended()
        self._ended()

    def _cannot_keep(self, value: Any) -> str | None:
        """Why an argument cannot be kept until backward, if it cannot."""
        kind: Any = type(value)
        if isinstance(value, _PLAIN) or kind is PagedTensor or _is_cache(value):
            return None
        if kind is not torch.Tensor:
            return f"is given an object of {kind.__name__}"
        if value.layout is not torch.strided or value.is_quantized:
            return "is given a tensor that is not strided"
        if value.untyped_storage()._cdata in self._saved.skip:
            return "is given a buffer of the model"
        if not (
            value.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(value)
        ) or value.is_conj() or value.is_neg():  # fmt: skip
            return "is given a view with gaps, or an expanded one"
        return None


class _Hook:
    """Of a block, for the time of an iteration. Copies of the block that are made meanwhile share
    it, and one that is pickled comes back with a hook that does nothing."""

    def __init__(self, call: weakref.WeakMethod[Any] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_dynamo_compiling():  # what is compiled is one op, and no segment
            return
        call = self._call() if self._call is not None else None
        if call is not None:
            call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return self

    def __reduce__(self) -> Any:
        return _Hook, ()


def repeated(module: torch.nn.Module, prefix: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """The outermost modules below ``module`` with parts and parameters of which there are several
    of one class beside each other, and their paths."""
    children = [(n, child) for n, child in module.named_children() if _is_large(child)]
    classes = Counter(type(child) for _, child in children)
    for name, child in children:
        if classes[type(child)] > 1 and not isinstance(child, torch.nn.ModuleList):
            if not isinstance(child, torch.jit.ScriptModule) and child._compiled_call_impl is None:
                yield prefix + name, child
        else:
            yield from repeated(child, f"{prefix}{name}.")


def _is_large(module: torch.nn.Module) -> bool:
    """It has parts, and parameters in pages; none of them a shard, which others gather."""
    parameters: list[Any] = list(module.parameters())
    return (
        bool(module._modules)
        and any(type(p) is PagedTensor for p in parameters)
        and not any(hasattr(p, "_local_tensor") for p in parameters)
    )


# -- running again ---------------------------------------------------------------------------------
class _Input:
    """An argument of a block, kept as saved tensors are."""

    def __init__(self, saved: SavedTensors, value: Any) -> None:
        self._saved, self._value, self._packed = saved, value, None
        self.runs: list[Extent] = []
        if not isinstance(value, torch.Tensor):
            if _is_cache(value):
                self._value = _hollow(value)
            return
        self._needs_grad, self._is_leaf = value.requires_grad, value.is_leaf
        self._value = None
        small = value.nbytes < saved.threshold or value.device.type != saved.device_type
        kind: Any = type(value)
        if kind is PagedTensor or not small:
            self._packed = saved.pack(value)
        elif value.is_leaf and value.requires_grad:
            self._value = value  # a parameter
        else:
            self._value = value.detach().clone()  # whoever changes it meanwhile may do so
        if type(self._packed) is InPages:
            self.runs = [self._packed.storage.run]

    def give(self) -> Any:
        """As the block was given it: the same kind of tensor, which asks for a gradient if that
        one did."""
        value: Any = self._value
        paged: PagedTensor | None = None
        if self._packed is None:
            if not isinstance(value, torch.Tensor) or (self._is_leaf and self._needs_grad):
                return value
        else:
            inside = type(self._packed) is InPages
            value = self._packed.paged() if inside else unpack(self._packed)
            if self._is_leaf and self._needs_grad:
                return value
            if inside:
                paged, value = value, plain_copy(value)
            else:
                value = value.detach()
        if self._needs_grad:
            # It was the result of an op: what saves leaves has another way for these.
            value = torch.ops.aten.alias(value.detach().requires_grad_())
        if paged is not None and paged.storage_offset() == 0 and paged.stride() == value.stride():
            # What saves the copy finds the pages that are there already.
            memory = value.untyped_storage()
            self._saved.note_origin(value, memory, paged._storage, Form.of(value))
        return value


class _Later:
    """Stands for a tensor that is stored when its segment runs again. ``packed``: then, as
    ``SavedTensors.pack`` gave it."""

    __slots__ = ("__weakref__", "form", "packed", "segment")

    def __init__(self, segment: _Segment, form: Form) -> None:
        self.segment: _Segment | None = segment
        self.form = form
        self.packed: Any = None

    def give(self) -> Any:
        if self.segment is not None:
            self.segment.run()
        return self.packed


class _Enough(BaseException):
    """All that is wanted of a segment is there. (No ``Exception``: a block may catch these.)"""


class _Segment:
    """One call of a block whose activations are not stored: it lives as long as one of them may be
    asked for. While it is ``SavedTensors.segment``, that asks it what becomes of large tensors."""

    def __init__(
        self, owner: Segments, path: str, block: torch.nn.Module, inputs: list[_Input], spec: Any
    ) -> None:
        self._owner, self._path = owner, path
        self._forward: Callable[..., Any] | None = block.forward
        self._inputs, self._spec = inputs, spec
        self._state = _State(owner._pager.device)
        self._later: list[weakref.ref[_Later] | None] = []
        self._at = -1  # of the tensors, while it runs again
        self._left = 0

    def pack(self, tensor: torch.Tensor, memory: torch.UntypedStorage) -> Any:
        """A tensor that would be stored. In the first run none is; in the second one those are that
        somebody still waits for."""
        saved = self._owner._saved
        if self._at >= 0:
            return self._store(tensor, memory)
        known = saved.known(tensor, memory)
        if known is not None:  # an input, or stored before it
            self._later.append(None)
            return known
        later = _Later(self, Form.of(tensor))
        self._later.append(weakref.ref(later))
        return later

    def _store(self, tensor: torch.Tensor, memory: torch.UntypedStorage) -> Any:
        saved, at = self._owner._saved, self._at
        self._at += 1
        ref = self._later[at] if at < len(self._later) else None
        later = ref() if ref is not None else None
        if later is None:  # nobody asks for it, but for backward passes in the block itself
            return tensor.detach(), tensor._version
        if later.form != Form.of(tensor):
            self._differs(f"a tensor of {list(tensor.shape)} where {list(later.form.size)} was")
        packed = saved.known(tensor, memory)
        if packed is None:
            packed = saved.store(tensor, memory)
            self._owner.nbytes += tensor.nbytes
        later.packed, later.segment = packed, None
        self._left -= 1
        if not self._left:
            raise _Enough
        return packed

    def _differs(self, how: str) -> None:
        reason = f"did other things when it ran again: {how}"
        self._owner.refused[self._path] = reason
        raise PagerError(
            f"block {self._path!r} {reason}, so its activations cannot be made again. Make its "
            "forward() depend on nothing but its arguments, parameters and PyTorch's random "
            "numbers, or use policy='lp'"
        )

    def run(self) -> None:
        """Run the block again, up to the last tensor that is wanted."""
        owner, saved = self._owner, self._owner._saved
        began = time.perf_counter()
        self._left = sum(ref is not None and ref() is not None for ref in self._later)
        before, saved.segment = saved.segment, self
        now, owner._now = owner._now, owner._now or self._forward
        self._at = 0
        try:
            with (
                self._state.restored(),
                torch.autograd.graph.saved_tensors_hooks(saved.pack, unpack),
            ):
                args, kwargs = tree_unflatten([each.give() for each in self._inputs], self._spec)
                assert self._forward is not None
                self._forward(*args, **kwargs)
        except _Enough:
            pass
        finally:
            saved.segment, owner._now, self._at = before, now, -1
        if self._left:
            self._differs(f"it saved {self._left} tensors less")
        self._forward, self._inputs = None, []
        owner.reruns += 1
        owner.seconds += time.perf_counter() - began


class _State:
    """Random numbers and autocast, as they are now."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._random = torch.get_rng_state()
        self._of_device = None
        if device.type != "cpu":
            self._of_device = torch.get_device_module(device).get_rng_state(device)
        self._autocast = {kind: _autocast(kind) for kind in {"cpu", device.type}}

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, they are that again, and gradients are on."""
        device = self._device
        others = [] if self._of_device is None else [device]
        kind = "cuda" if device.type == "cpu" else device.type
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(others, device_type=kind))
            torch.set_rng_state(self._random)
            if self._of_device is not None:
                torch.get_device_module(device).set_rng_state(self._of_device, device)
            for name, state in self._autocast.items():
                if state != _autocast(name):
                    enabled, dtype, cache = state
                    stack.enter_context(
                        torch.autocast(name, enabled=enabled, dtype=dtype, cache_enabled=cache)
                    )
            stack.enter_context(torch.enable_grad())
            yield


def _autocast(kind: str) -> tuple[bool, torch.dtype | None, bool]:
    if not torch.is_autocast_enabled(kind):
        return False, None, torch.is_autocast_cache_enabled()
    return True, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


# -- caches of transformers ------------------------------------------------------------------------
def _is_cache(value: Any) -> bool:
    """One that grows, and of which a block uses the layer that is its own."""
    cls: Any = type(value)
    return (
        (cls.__module__, cls.__name__) == ("transformers.cache_utils", "DynamicCache")
        and not value.offloading
        and all(type(layer).__name__ in _LAYERS for layer in value.layers)
    )


def _hollow(cache: Any) -> Any:
    """A copy that knows the lengths of what is in it, and no more: whoever reads that fails."""
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in twin.layers:
        if layer.is_initialized:
            layer.keys, layer.values = (
                torch.empty(kept.shape, dtype=kept.dtype, device="meta")
                for kept in (layer.keys, layer.values)
            )
    return twin


def _filled(cache: Any) -> dict[int, Any]:
    """The contents of its layers that have some."""
    layers = enumerate(cache.layers)
    return {number: layer.keys for number, layer in layers if layer.is_initialized}


# -- what changes when a block runs ----------------------------------------------------------------
class _Watch:
    """Looks at a block before and after one call."""

    def __init__(self, path: str, block: torch.nn.Module, values: list[Any]) -> None:
        self.path = path
        self._block, self._values = block, values
        self._before = self._look()
        self._filled = [(value, _filled(value)) for value in values if _is_cache(value)]

    def changed(self) -> str | None:
        """What the call has changed, if anything."""
        before, after = self._before, self._look()
        for name, what in {**after, **before}.items():
            then, now = before.get(name), after.get(name)
            if then is None or now is None or then[0] is not now[0] or then[1:] != now[1:]:
                return f"changes {name}" + (" in place" if type(what[0]) is torch.Tensor else "")
        for cache, filled in self._filled:
            now_there = _filled(cache)
            if any(now_there.get(number) is not keys for number, keys in filled.items()):
                return "adds to what is in its cache already"
        return None

    def _look(self) -> dict[str, tuple[Any, ...]]:
        found: dict[str, tuple[Any, ...]] = {"Python's random numbers": (None, random.getstate())}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            _, keys, *rest = numpy.random.get_state()
            found["NumPy's random numbers"] = (None, keys.tobytes(), rest)
        with torch._C.DisableTorchFunctionSubclass():
            for number, value in enumerate(self._values):
                if isinstance(value, torch.Tensor):
                    found[f"its argument {number}"] = (value, value._version)
            for path, module in self._block.named_modules():
                prefix = f"{path}." if path else ""
                for name, value in {**vars(module), **module._parameters}.items():
                    found[prefix + name] = value, *_size_of(value)
                for name, value in module._buffers.items():
                    found[prefix + name] = value, *_size_of(value), _bytes_of(value)
        return found


def _bytes_of(buffer: Any) -> bytes:
    """Batch norms change theirs without counting a version."""
    if type(buffer) is not torch.Tensor or buffer.nbytes > _LARGE or not buffer.numel():
        return b""
    return array_of(buffer.detach().contiguous().reshape(-1).view(torch.uint8)).tobytes()


def _size_of(value: Any) -> tuple[Any, ...]:
    """What shows that an attribute was changed and not replaced."""
    if isinstance(value, torch.Tensor):
        return (value._version,)
    if isinstance(value, list | dict | set | deque):
        return (len(value),)
    if isinstance(value, torch.Generator):
        return (value.get_state().tolist(),)
    return ()
