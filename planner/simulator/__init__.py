"""The machine model, fast: ``simulate`` runs a plan until its iterations repeat."""

from .machine import simulate

__all__ = ["simulate"]
