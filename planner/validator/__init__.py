"""The machine model once more, page by page and from its text alone: ``validate`` judges a plan.

It shares no code with the simulator.
"""

from .machine import validate

__all__ = ["validate"]
