"""What a plan decided, layer by layer: what comes back, what is made again, what the host steps."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from ..plan import DISCARD, Plan
from ..trace import Trace


@dataclass
class Layer:
    """``names``: the first and last layer of which this is true; sums over them."""

    names: tuple[str, str]
    layers: int = 1
    in_bytes: int = 0
    discarded_bytes: int = 0
    recompute_us: float = 0.0
    host_steps: int = 0

    def alike(self, other: Layer) -> bool:
        """Whether the same was chosen for each layer of both, but for how much moves."""
        mine, theirs = (
            (e.discarded_bytes / e.layers, e.recompute_us / e.layers, e.host_steps / e.layers)
            for e in (self, other)
        )
        return all(abs(a - b) <= 1e-6 * max(a, b) for a, b in zip(mine, theirs))


def layer_of(name: str | None) -> str:
    """The first number in a name; "–" where there is none."""
    found = re.search(r"\d+", name or "")
    return found.group() if found else "–"


def decided(trace: Trace, plan: Plan) -> list[Layer]:
    """By the numbers in the names of tensors and ops; neighbours of which the same is true are
    one."""
    layers: defaultdict[str, Layer] = defaultdict(lambda: Layer(("", "")))
    for move in plan.moves:
        layer = layers[layer_of(trace.tensor_names[trace.index_of[move.tensor]])]
        nbytes = move.page_count * plan.page_size
        layer.in_bytes += nbytes * (move.action == "in")
        layer.discarded_bytes += nbytes * (move.action == DISCARD)
    for first, last, _ in plan.recompute:
        for op in range(first, last + 1):
            layer = layers[layer_of(trace.op_names[op])]
            layer.recompute_us += float(trace.op_duration_us[op])
    for op in plan.host_steps:
        layers[layer_of(trace.op_names[op])].host_steps += 1
    found: list[Layer] = []
    for name in sorted(layers, key=lambda name: int(name) if name.isdigit() else -1):
        layer = layers[name]
        layer.names = (name, name)
        if found and found[-1].alike(layer):
            last_one = found[-1]
            last_one.names = (last_one.names[0], name)
            last_one.layers += 1
            last_one.in_bytes += layer.in_bytes
            last_one.discarded_bytes += layer.discarded_bytes
            last_one.recompute_us += layer.recompute_us
            last_one.host_steps += layer.host_steps
        else:
            found.append(layer)
    return found
