"""``tensorpager record`` on a script that knows nothing of us: one iteration of plain PyTorch.

When the script has loaded PyTorch, :func:`watch` registers one of PyTorch's own global hooks: an
iteration ends with the step of the optimizer that steps last in it, or with every so many steps
where the user says how many. The iteration that is recorded
runs under a dispatch mode, which sees every op with its operands. A tensor is a storage, as long as
it lives::

    step | zero_grad  forward            backward           step | zero_grad …
         |<------------------ an iteration ---------------------->|

Before it each step costs one call more. A script that makes a ``Pager`` is recorded by that, not
here. On accelerators, where ops run later than they are called, nothing is recorded.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from .record import Report, write

if TYPE_CHECKING:
    from ...planner.trace import Trace

PAGE_SIZE = 2 << 20
SMALL_PAGE, SMALL_MODEL = 1 << 16, 1 << 28  # bytes: smaller pages below that much in all
SOURCE = "tensorpager, plain PyTorch"


class _Storage:
    """One that an op used: ``reference`` says whether it lives, ``name`` what it is."""

    __slots__ = ("before", "kind", "name", "nbytes", "number", "reference")

    def __init__(self, number: int, storage: torch.UntypedStorage, *, before: bool) -> None:
        self.number, self.before = number, before
        self.reference = StorageWeakRef(storage)
        self.nbytes = storage.nbytes()
        self.name: str | None = None
        self.kind = "input" if before else "activation"


class _Log(TorchDispatchMode):
    """Of one iteration: ops with their durations, what they read and what they wrote."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[tuple[str, float, list[int], list[int]]] = []
        self.storages: list[_Storage] = []
        self.modules: list[tuple[torch.nn.Module, str]] = []  # that run now
        self.paths: dict[torch.nn.Module, str] = {}
        self.foreign: set[str] = set()  # devices whose work runs later
        self._known: dict[int, _Storage] = {}
        self._last = time.perf_counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        reads: list[int] = []
        writes: list[int] = []
        for argument, value in _arguments(func, args, kwargs):
            info = argument.alias_info
            changed = info is not None and info.is_write
            for tensor in _tensors(value):
                number = self._number(tensor, before=True)
                if number >= 0:
                    reads.append(number)
                    if changed:
                        writes.append(number)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            number = self._number(tensor, before=False)
            if number >= 0 and number not in reads:
                writes.append(number)
        now = time.perf_counter()
        self.ops.append((func._schema.name, (now - self._last) * 1e6, reads, writes))
        self._last = now
        return result

    def _number(self, tensor: torch.Tensor, *, before: bool) -> int:
        """Of the tensor's storage; −1 where it has none, or an empty one."""
        if tensor.device.type not in ("cpu", "meta"):
            self.foreign.add(str(tensor.device))
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse, opaque
            return -1
        if not storage.nbytes() or tensor.device.type == "meta":
            return -1
        address = storage._cdata
        known = self._known.get(address)
        if known is None or known.reference.expired():
            known = _Storage(len(self.storages), storage, before=before)
            self._known[address] = known
            self.storages.append(known)
            if not before and self.modules:
                known.name = f"{self.modules[-1][1]}:out.{len(self.ops)}"
        return known.number

    def name(self, tensor: torch.Tensor | None, name: str, kind: str) -> None:
        """Called when the iteration is over, of what is still there."""
        if tensor is None:
            return
        number = self._known.get(tensor.untyped_storage()._cdata)
        if number is not None and not number.reference.expired():
            number.name, number.kind = name, kind


def _arguments(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    for argument, value in zip(func._schema.arguments, args):
        yield argument, value
    if kwargs:
        named = {argument.name: argument for argument in func._schema.arguments}
        for name, value in kwargs.items():
            if name in named:
                yield named[name], value


def _tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


class Watch:
    """Counts iterations, and records the one that the report asks for, or the next one."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._completed = 0
        self._log: _Log | None = None
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._round: list[int] = []  # who has stepped since the iteration began
        self._steps_done = 0
        self._last: int | None = None  # who steps last in an iteration
        self._roots: dict[torch.nn.Module, None] = {}
        self._steps = register_optimizer_step_post_hook(self._on_step)
        self._calls: list[Any] = []
        report.tell(iterations=0)

    def _on_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        identity = id(optimizer)
        self._optimizers[identity] = optimizer
        if self._report.every is not None:
            self._steps_done += 1
            if self._steps_done % self._report.every == 0:
                self._end()
            return
        if identity in self._round:  # a second time: the iteration before it is over
            if self._last is None:
                self._completed += 1
            self._last, self._round = self._round[-1], []
        self._round.append(identity)
        if identity == self._last:
            self._end()

    # -- modules, while one is recorded ------------------------------------------------------
    def _enter(self, module: torch.nn.Module, inputs: Any) -> None:
        log = self._log
        if log is None:
            return
        if not log.modules:
            self._roots[module] = None
            for path, inner in module.named_modules():
                log.paths.setdefault(inner, path)
        log.modules.append((module, log.paths.get(module) or type(module).__name__))

    def _leave(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        log = self._log
        if log is not None and log.modules and log.modules[-1][0] is module:
            log.modules.pop()

    # -- iterations --------------------------------------------------------------------------
    def _end(self) -> None:
        self._completed += 1
        log, self._log = self._log, None
        if log is not None:
            log.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._stop()
            self._finish(log)
        elif _pages():
            self._stop()
        elif self._completed + 1 < self._report.number:
            self._report.tell(iterations=self._completed)
        elif self._report.claim():
            self._calls = [
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, always_call=True),
            ]
            self._log = _Log()
            self._log.__enter__()  # type: ignore[no-untyped-call]
        else:
            self._stop()

    def _stop(self) -> None:
        for hook in (self._steps, *self._calls):
            hook.remove()

    def _finish(self, log: _Log) -> None:
        try:
            if log.foreign:
                raise RuntimeError(
                    f"ops ran on {', '.join(sorted(log.foreign))}, later than they were called; "
                    "use torch.profiler there (profile_memory=True, record_shapes=True) and "
                    "'tensorpager import torch-profiler', or train with a Pager"
                )
            trace = write(self._report.target, self._trace(log))
            self._report.tell(
                iterations=self._completed, written=True, ops=trace.ops, tensors=trace.tensors
            )
        except Exception as error:
            self._report.fail(error, self._completed)

    def _trace(self, log: _Log) -> Trace:
        """Parameters, gradients and states by their names; what lives on is persistent."""
        from ...planner.trace import make_trace

        named = {
            parameter: path for root in self._roots for path, parameter in root.named_parameters()
        }
        for root in self._roots:
            for path, buffer in root.named_buffers():
                log.name(buffer, path, "input")
        for optimizer in self._optimizers.values():
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for number, parameter in enumerate(parameters):
                path = named.setdefault(parameter, f"parameter.{number}")
                for state, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        log.name(value, f"{path}.{state}", "optimizer")
        for parameter, path in named.items():
            log.name(parameter, path, "parameter")
            log.name(parameter.grad, f"{path}.grad", "gradient")
        nbytes = sum(one.nbytes for one in log.storages if one.before)
        return make_trace(
            [
                (one.number, one.nbytes, one.before and not one.reference.expired())
                for one in log.storages
            ],
            log.ops,
            page_size=PAGE_SIZE if nbytes >= SMALL_MODEL else SMALL_PAGE,
            names={one.number: one.name for one in log.storages if one.name is not None},
            kinds={one.number: one.kind for one in log.storages},
            source=SOURCE,
            device="cpu",
            metadata={"torch": torch.__version__},
        )


def _pages() -> bool:
    """Whether the script has made a Pager, which records itself."""
    api = sys.modules.get("tensorpager.pager.api")
    return api is not None and len(api._open_pagers) > 0


_watch: Watch | None = None


def watch() -> None:
    """Once in a process, if the environment asks for a recording."""
    global _watch
    if _watch is None and (report := Report.from_environment()) is not None:
        _watch = Watch(report)
