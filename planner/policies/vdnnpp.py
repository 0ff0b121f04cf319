"""vDNN++ (Shriram, Garg and Kulkarni, "Dynamic Memory Management for GPU-Based Training of Deep
Neural Networks", IPDPS 2019; read in abstract, parts in code).

Offloads and prefetches as vDNN does (``vdnn``, variant `dyn`), without its wait after each layer:
memory is free when the offload's event fires, and an allocation waits only when there is none. That
is how the machine model works by itself, so the plan is vDNN's without fences.

Not carried out: placing offloaded and other tensors at opposite ends of the pool (pages do not
fragment) and compressing what is offloaded (its ratio depends on values that a trace has not).
"""

from __future__ import annotations

from ..hardware import Hardware
from ..plan import Plan
from ..trace import Trace
from .vdnn import plan_for


def plan(trace: Trace, hardware: Hardware) -> Plan:
    """Raises ``PolicyRefusal`` as vDNN does."""
    return plan_for(trace, hardware, "vdnn++", "dyn", waits=False)
