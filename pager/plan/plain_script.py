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
from functools import cache
from types import NoneType
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from ...planner.trace import Trace, make_trace
from .record import Report, write

PAGE_SIZE = 2 << 20
SMALL_PAGE, SMALL_MODEL = 1 << 16, 1 << 28  # bytes: smaller pages below that much in all
SOURCE = "tensorpager, plain PyTorch"
HOST_BYTES_PER_S = 50e9  # that an update on the host reads and writes, as hardware files assume


class _Mark:
    """An attribute of a storage, which goes with it: an address would be another one's then, and a
    weak reference of PyTorch's keeps a piece of memory that cuts the heap in parts."""

    __slots__ = ("__weakref__", "log", "number")

    def __init__(self, log: object, number: int) -> None:
        self.log, self.number = log, number


class _Storage:
    """One that an op used: ``mark`` says whether it lives, ``name`` what it is. ``first`` is the op
    that made it, in ``module``; −1 if it was there before."""

    __slots__ = ("before", "kind", "mark", "name", "nbytes", "number")

    def __init__(
        self, number: int, mark: ReferenceType[_Mark], nbytes: int, first: int, module: str | None
    ) -> None:
        self.number, self.mark, self.nbytes = number, mark, nbytes
        self.before = first < 0
        self.name = f"{module}:out.{first}" if module else None
        self.kind = "input" if self.before else "activation"


class IterationLog(TorchDispatchMode):
    """Of one iteration: ops with their durations, what they read and what they wrote, and which
    may run again; the blocks of the model; the steps of optimizers.

    While it runs it notes as little as it can; :meth:`stop` makes ``ops``, ``rerun`` and
    ``storages`` of that."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[tuple[str, float, list[int], list[int]]] = []
        self.rerun: list[bool] = []
        self.storages: list[_Storage] = []
        self.segments: list[tuple[int, int, str]] = []
        self.steps: list[tuple[int, int, torch.optim.Optimizer]] = []  # first op, end
        self.foreign: set[str] = set()  # devices whose work runs later
        self.durations: list[float] = []  # of each op, seconds
        self.kinds: dict[int, str] = {}  # of storages that are neither inputs nor activations
        # Of each op: what it is, its operands, the names of the last ones, its results, and
        # whether it is of the backward pass. Operands and results are numbers of storages.
        self._noted: list[tuple[Any, list[Any], tuple[str, ...], list[Any], bool]] = []
        self._found: list[tuple[ReferenceType[_Mark], int, int, str | None]] = []  # see _Storage
        self._modules: list[tuple[torch.nn.Module, str, int]] = []  # that run now, since which op
        self._paths: dict[torch.nn.Module, str] = {}
        self._roots: dict[torch.nn.Module, None] = {}
        self._stepping: tuple[int, torch.optim.Optimizer] | None = None
        self._last = _now()

    def start(self) -> None:
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
            register_optimizer_step_pre_hook(self._step_begins),
        ]
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        self.storages = [_Storage(number, *found) for number, found in enumerate(self._found)]
        for number, kind in self.kinds.items():
            self.storages[number].kind = kind
        stepped = {op for first, end, _ in self.steps for op in range(first, end)}
        for op, (func, operands, keys, results, backward) in enumerate(self._noted):
            name, pure, changed = _schema(func)
            reads: list[int] = []
            writes: list[int] = []
            names = (*range(len(operands) - len(keys)), *keys)
            for key, used in zip(names, operands):
                numbers = _flat(used)
                reads += numbers
                if key in changed:
                    writes += numbers
            writes += [number for number in _flat(results) if number not in reads]
            self.ops.append((name, self.durations[op] * 1e6, reads, writes))
            self.rerun.append(pure and not backward and op not in stepped)

    # -- ops -------------------------------------------------------------------------------------
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Time that is spent here is no part of the op."""
        entered = _now()
        if func.namespace in _NO_OPS:
            return func(*args, **(kwargs or {}))
        operands = self._used((*args, *kwargs.values()) if kwargs else args, -1)
        begun = _now()
        result = self.run(func, args, kwargs or {})
        ended = _now()
        made = self._used((result,), len(self._noted))
        keys = tuple(kwargs) if kwargs else ()
        self._noted.append((func, operands, keys, made, _node() is not None))
        self.durations.append(ended - begun + entered - self._last)
        self._last = _now()
        return result

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What the op returns."""
        return func(*args, **kwargs) if kwargs else func(*args)

    def _used(self, values: Any, op: int) -> list[Any]:
        """Of operands, or what ``op`` returned: the numbers of their storages; a list for a list,
        −1 for what is no tensor, has no storage, or an empty one."""
        used: list[Any] = []
        for value in values:
            if type(value) in _PLAIN:
                used.append(-1)
            elif isinstance(value, torch.Tensor):
                try:
                    storage = value.untyped_storage()
                except (NotImplementedError, RuntimeError):  # sparse, opaque
                    used.append(-1)
                    continue
                mark = getattr(storage, _MARK, None)
                if mark is None or mark.log is not self._found:
                    used.append(self._new(value, storage, op))
                else:
                    used.append(mark.number)
            elif isinstance(value, list | tuple):
                used.append(self._used(value, op))
            else:
                used.append(-1)
        return used

    def _new(self, tensor: torch.Tensor, storage: torch.UntypedStorage, op: int) -> int:
        nbytes = storage.nbytes()
        if not tensor.is_cpu:
            if tensor.is_meta:
                return -1
            self.foreign.add(str(tensor.device))
        if not nbytes:
            return -1
        number = len(self._found)
        mark = _Mark(self._found, number)
        setattr(storage, _MARK, mark)
        module = self._modules[-1][1] if op >= 0 and self._modules else None
        self._found.append((ref(mark), nbytes, op, module))
        return number

    def update_us(self, us: float, nbytes: int) -> float:
        """What an update took whose ops took ``us`` in all, and that is ``nbytes`` of reading and
        writing."""
        return us

    # -- modules and steps -----------------------------------------------------------------------
    def _enter(self, module: torch.nn.Module, inputs: Any) -> None:
        if not self._modules:
            self._roots[module] = None
            for path, inner in module.named_modules():
                self._paths.setdefault(inner, path)
        path = self._paths.get(module) or type(module).__name__
        self._modules.append((module, path, len(self._noted)))

    def _leave(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if not self._modules or self._modules[-1][0] is not module:
            return
        _, path, first = self._modules.pop()
        # Blocks are what a model has a list of.
        if path.rpartition(".")[2].isdecimal() and first < len(self._noted) and not _node():
            self.segments.append((first, len(self._noted) - 1, path))

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._stepping = len(self._noted), optimizer

    def step_ended(self) -> None:
        if self._stepping is not None:
            first, optimizer = self._stepping
            self.steps.append((first, len(self._noted), optimizer))
            self._stepping = None

    # -- the trace -------------------------------------------------------------------------------
    def _name(self, tensor: torch.Tensor | None, name: str, kind: str) -> _Storage | None:
        """Called when the iteration is over, of what is still there."""
        if tensor is None:
            return None
        mark = getattr(tensor.untyped_storage(), _MARK, None)
        if mark is None or mark.log is not self._found:
            return None
        known: _Storage = self.storages[mark.number]
        known.name, known.kind = name, kind
        return known

    def _name_all(self) -> dict[int, str]:
        """Parameters, gradients and states by their names. Gives the parameter's of each."""
        named = {p: path for root in self._roots for path, p in root.named_parameters()}
        for root in self._roots:
            for path, buffer in root.named_buffers():
                self._name(buffer, path, "input")
        owned: list[tuple[_Storage | None, str]] = []
        for _, _, optimizer in self.steps:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for number, parameter in enumerate(parameters):
                path = named.setdefault(parameter, f"parameter.{number}")
                for state, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        owned.append((self._name(value, f"{path}.{state}", "optimizer"), path))
        for parameter, path in named.items():
            owned.append((self._name(parameter, path, "parameter"), path))
            owned.append((self._name(parameter.grad, f"{path}.grad", "gradient"), path))
        return {storage.number: path for storage, path in owned if storage is not None}

    def trace(
        self,
        *,
        host_bytes_per_s: float,
        source: str,
        device: str = "cpu",
        metadata: dict[str, Any] | None = None,
    ) -> Trace:
        """What lives on is persistent. What a step does for one parameter is one op."""
        owners = self._name_all()
        ops, rerun, host, place = self._with_updates(owners, host_bytes_per_s)
        nbytes = sum(one.nbytes for one in self.storages if one.before)
        return make_trace(
            [
                (one.number, one.nbytes, one.before and one.mark() is not None)
                for one in self.storages
            ],
            ops,
            page_size=PAGE_SIZE if nbytes >= SMALL_MODEL else SMALL_PAGE,
            names={one.number: one.name for one in self.storages if one.name is not None},
            kinds={one.number: one.kind for one in self.storages},
            source=source,
            device=device,
            metadata={"torch": torch.__version__, **(metadata or {})},
            rerun=rerun,
            host_us=host,
            segments=[(place[first], place[last], name) for first, last, name in self.segments],
        )

    def _with_updates(self, owners: dict[int, str], host_bytes_per_s: float) -> Any:
        """Ops, which may run again, what the host takes for them, and where each op is now. Ops of
        a step that are for one parameter become one, which is what a kernel of ours does, without
        what lives inside of it only. Where an op is for several parameters nothing changes."""
        group: dict[int, tuple[str, bool]] = {}  # op → of which parameter, can the host do it
        for first, end, optimizer in self.steps:
            of = [
                {owners[n] for n in (*op[2], *op[3]) if n in owners} for op in self.ops[first:end]
            ]
            if any(len(names) > 1 for names in of):
                continue
            hosted, current = type(optimizer) in _HOSTED, ""
            for op, names in enumerate(of, first):
                current = next(iter(names), current)
                if current:
                    group[op] = current, hosted
        used: dict[int, set[Any]] = {}
        for op, (_, _, reads, writes) in enumerate(self.ops):
            for number in (*reads, *writes):
                used.setdefault(number, set()).add(group.get(op, op))
        inside = {
            number
            for number, by in used.items()
            if number not in owners and len(by) == 1 and isinstance(next(iter(by)), tuple)
        }
        # Counters of steps are scalars of the host.
        inside |= {number for number in owners if self.storages[number].nbytes <= _SCALAR}
        ops: list[tuple[str, float, list[int], list[int]]] = []
        rerun: list[bool] = []
        host: list[float | None] = []
        place: list[int] = []
        last: tuple[str, bool] | None = None
        for op, (name, us, reads, writes) in enumerate(self.ops):
            mine = group.get(op)
            if mine is not None:
                reads = [n for n in reads if n not in inside]
                writes = [n for n in writes if n not in inside]
                if mine == last:
                    _, before, old_reads, old_writes = ops[-1]
                    reads = list(dict.fromkeys((*old_reads, *reads)))
                    writes = list(dict.fromkeys((*old_writes, *writes)))
                    ops[-1] = f"update.{mine[0]}", before + us, reads, writes
                else:
                    ops.append((f"update.{mine[0]}", us, reads, writes))
                    rerun.append(False)
                    host.append(None)
                nbytes = sum(self.storages[n].nbytes for n in (*reads, *writes))
                ops[-1] = ops[-1][0], self.update_us(ops[-1][1], nbytes), reads, writes
                host[-1] = 1e6 * nbytes / host_bytes_per_s if mine[1] else None
            else:
                ops.append((name, us, reads, writes))
                rerun.append(self.rerun[op])
                host.append(None)
            last = mine
            place.append(len(ops) - 1)
        return ops, rerun, host, place


_HOSTED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
_SCALAR = 8  # bytes
_MARK = "_tensorpager_recorded"
_PLAIN = {
    NoneType,
    bool,
    int,
    float,
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
}
_now = time.perf_counter
_node = torch._C._current_autograd_node  # None outside of the backward pass
_NO_OPS = ("prim", "profiler")  # questions about a tensor, marks of the profiler
_UNSAID = "batch_norm"  # some of these change statistics without saying so


@cache
def _schema(func: Any) -> tuple[str, bool, frozenset[int | str]]:
    """Of an op: its name, whether it may run again, and the arguments that it changes, by position
    and by name. Asking PyTorch takes longer than many an op does."""
    schema = func._schema
    changed: set[int | str] = set()
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed |= {position, argument.name}
    pure = not schema.is_mutable and _UNSAID not in schema.name
    return schema.name, pure, frozenset(changed)


def _flat(used: Any) -> list[int]:
    if isinstance(used, int):
        return [used] if used >= 0 else []
    return [number for one in used for number in _flat(one)]


class Watch:
    """Counts iterations, and records the one that the report asks for, or the next one."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._completed = 0
        self._log: IterationLog | None = None
        self._round: list[int] = []  # who has stepped since the iteration began
        self._steps_done = 0
        self._last: int | None = None  # who steps last in an iteration
        self._steps = register_optimizer_step_post_hook(self._on_step)
        report.tell(iterations=0)

    def _on_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        identity = id(optimizer)
        if self._log is not None:
            self._log.step_ended()
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

    def _end(self) -> None:
        self._completed += 1
        log, self._log = self._log, None
        if log is not None:
            log.stop()
            self._steps.remove()
            self._finish(log)
        elif _pages():
            self._steps.remove()
        elif self._completed + 1 < self._report.number:
            self._report.tell(iterations=self._completed)
        elif self._report.claim():
            self._log = IterationLog()
            self._log.start()
        else:
            self._steps.remove()

    def _finish(self, log: IterationLog) -> None:
        try:
            if log.foreign:
                raise RuntimeError(
                    f"ops ran on {', '.join(sorted(log.foreign))}, later than they were called; "
                    "use torch.profiler there (profile_memory=True, record_shapes=True) and "
                    "'tensorpager import torch-profiler', or train with a Pager"
                )
            made = log.trace(host_bytes_per_s=HOST_BYTES_PER_S, source=SOURCE)
            trace = write(self._report.target, made)
            self._report.tell(
                iterations=self._completed, written=True, ops=trace.ops, tensors=trace.tensors
            )
        except Exception as error:
            self._report.fail(error, self._completed)


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
