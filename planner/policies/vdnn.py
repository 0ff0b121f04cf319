"""vDNN (Rhu et al., "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural
Network Design", MICRO 2016; read in code and abstract).

Inputs of layers go to the host after their last layer of the forward pass has run and come back in
the backward pass. `all` sends the inputs of every layer but activation functions, softmax and fully
connected ones, `conv` those of convolutions; the last such layer keeps its inputs. In the backward
pass, while layer i runs, the nearest earlier layer that was offloaded and is not back yet is
fetched, searching no further than a layer of the policy's kind that was not offloaded. `dyn` takes
the first of nothing, `conv`, `all` that fits.

A trace has ops, not layers. The forward pass ends where most is live; each of its ops is a layer,
of a kind that its name tells. Where a trace has more matrix products than convolutions, they stand
for the convolutions (a transformer has few others); else they are the fully connected layers. Ops
of the backward pass belong to layers by the tensors that they read.

vDNN waits after each layer until its offload and its prefetch are done. A plan can't say "wait", so
it is expressed by a *fence*: a small tensor that an op needs is sent out behind the offloads and
fetched back behind the prefetches, which costs its own transfer and no more. An offload can begin
only when its layer has run, not beside it, so the fence is at the op after the next. Where no small
tensor serves, there is no fence, and ours is faster than the published policy. Choosing convolution
algorithms, the other half of `dyn`, has no counterpart here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..errors import PolicyRefusal
from ..hardware import Hardware
from ..plan import Plan
from ..sizes import format_bytes
from ..trace import READ, Bools, Ints, Trace
from .fences import fences
from .whole import (
    Decision,
    Room,
    build,
    check_possible,
    prefetch,
    refuse_if_over,
    whole_gaps,
)

Kind = Literal["none", "conv", "all"]
CONVOLUTION = re.compile("conv", re.IGNORECASE)
PRODUCT = re.compile(r"gemm|matmul|linear|dense|addmm|bmm|(?<![a-z])mm(?![a-z])", re.IGNORECASE)
ACTIVATION = re.compile("relu|gelu|silu|swish|tanh|sigmoid|softmax|erf", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class Layers:
    """Layer = op of the forward pass, 0 … ``count`` − 1. ``convolutional`` and ``offloadable``
    say which kinds `conv` and `all` offload; ``backward_layer``: of each op from ``count`` on the
    layer it has come down to."""

    count: int
    convolutional: Bools
    offloadable: Bools
    backward_layer: Ints  # [ops − count]


def plan(
    trace: Trace, hardware: Hardware, *, variant: Literal["all", "conv", "dyn"] = "dyn"
) -> Plan:
    """Raises ``PolicyRefusal`` if what ``variant`` offloads does not make room, or the host has no
    slots for it."""
    return plan_for(trace, hardware, f"vdnn-{variant}", variant, waits=True)


def plan_for(
    trace: Trace, hardware: Hardware, name: str, variant: Literal["all", "conv", "dyn"], waits: bool
) -> Plan:
    """The plan called ``name``; ``waits``: with fences after offloads and prefetches."""
    check_possible(trace, hardware, name)
    layers = find_layers(trace, hardware)
    kinds: tuple[Kind, ...] = ("none", "conv", "all") if variant == "dyn" else (variant,)
    refusal: PolicyRefusal | None = None
    for kind in kinds:
        try:
            room, decisions = _offload(trace, hardware, name, kind, layers)
        except PolicyRefusal as error:
            refusal = error
            continue
        waiting = fences(trace, room, decisions) if waits else []
        return build(trace, hardware, name, decisions, first_moves=waiting)
    assert refusal is not None
    raise refusal


def find_layers(trace: Trace, hardware: Hardware) -> Layers:
    """Split the trace where most is live."""
    load = Room(trace, hardware).used["device"]
    count = int(load.argmax()) + 1 if trace.ops else 0
    names = trace.op_names[:count]
    convolution = np.array([bool(CONVOLUTION.search(name)) for name in names], np.bool_)
    product = np.array([bool(PRODUCT.search(name)) for name in names], np.bool_) & ~convolution
    activation = np.array([bool(ACTIVATION.search(name)) for name in names], np.bool_)
    if product.sum() > convolution.sum():
        convolution |= product
        product = np.zeros(count, np.bool_)
    return Layers(count, convolution, ~product & ~activation, _backward_layers(trace, count))


def _backward_layers(trace: Trace, count: int) -> Ints:
    """For each op of the backward pass the layer it has come down to, never rising.

    What layer i reads or writes was last used by layer i or a later one; so of the layers that were
    the last to use what a backward op reads, the first is its own, if that reads its own input.
    """
    latest = np.full(trace.tensors, -1, np.int64)
    forward = trace.access_op < count
    np.maximum.at(latest, trace.access_tensor[forward], trace.access_op[forward])
    latest[latest < 0] = count
    layer = np.full(trace.ops - count, count, np.int64)
    np.minimum.at(layer, trace.access_op[~forward] - count, latest[trace.access_tensor[~forward]])
    return np.minimum.accumulate(layer) if len(layer) else layer


def _offload(
    trace: Trace, hardware: Hardware, name: str, kind: Kind, layers: Layers
) -> tuple[Room, list[Decision]]:
    room = Room(trace, hardware)
    decisions = [] if kind == "none" else _offloads(trace, hardware, kind, layers)
    for decision in decisions:
        if not room.has_slots(decision):
            raise PolicyRefusal(
                f"{name}: the host's {format_bytes(hardware.host_bytes)} are full before op "
                f"{decision.out_op}, when {trace.name_of(decision.tensor)} should go there"
            )
        room.take(decision)
    refuse_if_over(room, hardware, name, f"with all {len(decisions)} layer inputs offloaded")
    chosen = layers.convolutional if kind == "conv" else layers.offloadable
    return room, prefetch(room, decisions, _prefetch_ops(decisions, layers, chosen))


def _offloads(trace: Trace, hardware: Hardware, kind: Kind, layers: Layers) -> list[Decision]:
    """Tensors that a layer of the kind reads and that are idle from the forward pass into the
    backward pass, in the order of their layers."""
    chosen = layers.convolutional if kind == "conv" else layers.offloadable
    reads = (trace.access_op < layers.count) & ((trace.access_mode & READ) != 0)
    reads[reads] = chosen[trace.access_op[reads]]
    is_input = np.zeros(trace.tensors, np.bool_)
    is_input[trace.access_tensor[reads]] = True
    is_input &= ~trace.tensor_persistent
    gaps = whole_gaps(trace, hardware.page_size)
    last_chosen = int(np.flatnonzero(chosen)[-1]) if chosen.any() else -1
    gaps = gaps.pick(
        is_input[gaps.tensor]
        & (gaps.last_op < layers.count)
        & (gaps.next_op >= layers.count)
        & (gaps.last_op != last_chosen)
    )
    return [gaps.away(n, "host") for n in np.argsort(gaps.last_op, kind="stable").tolist()]


def _prefetch_ops(decisions: list[Decision], layers: Layers, chosen: Bools) -> list[int]:
    """The op of the backward pass beside which each decision's tensor is fetched."""
    waiting: dict[int, list[int]] = {}
    for number, decision in enumerate(decisions):
        waiting.setdefault(decision.last_op, []).append(number)
    offloaded = set(waiting)
    wanted = [decision.next_op for decision in decisions]
    before = layers.count + 1
    for op, layer in enumerate(layers.backward_layer.tolist(), start=layers.count):
        if layer == before:
            continue
        before = layer
        for earlier in range(min(layer, layers.count) - 1, -1, -1):
            if earlier in waiting:
                for number in waiting.pop(earlier):
                    wanted[number] = min(op, wanted[number])
                break
            if chosen[earlier] and earlier not in offloaded:
                break
    return wanted
