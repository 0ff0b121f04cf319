"""Errors come whole out of another process: data loader workers, spawn, torchrun."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil

import pytest

import tensorpager
from tensorpager.pager.errors import CorruptPage, InfeasibleBudget


def exceptions() -> list[type[BaseException]]:
    """All classes of ours, in whatever module."""
    found: dict[str, type[BaseException]] = {}
    for module in pkgutil.walk_packages(tensorpager.__path__, "tensorpager."):
        try:
            members = vars(importlib.import_module(module.name))
        except ImportError:  # an optional package is not installed
            continue
        for value in members.values():
            if not inspect.isclass(value) or not issubclass(value, BaseException):
                continue
            if value.__module__.startswith("tensorpager."):
                found[f"{value.__module__}.{value.__qualname__}"] = value
    return [found[name] for name in sorted(found)]


def made(kind: type[BaseException]) -> BaseException:
    """One with a value for each argument that has no default."""
    if "__init__" not in vars(kind) and kind.__init__ in (
        BaseException.__init__,
        Exception.__init__,
        *(base.__init__ for base in (RuntimeError, ValueError)),
    ):
        return kind("what, how much, and the remedy")
    arguments, named = [], {}
    for parameter in list(inspect.signature(kind).parameters.values()):
        if parameter.kind is parameter.VAR_POSITIONAL:
            arguments.append("what, how much, and the remedy")
        elif parameter.default is parameter.empty and parameter.kind is parameter.KEYWORD_ONLY:
            named[parameter.name] = 1 << 20
        elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
            arguments.append("what, how much, and the remedy")
    return kind(*arguments, **named)


def test_there_are_many() -> None:
    names = {kind.__name__ for kind in exceptions()}
    assert {"PagerError", "InfeasibleBudget", "TierFull", "CorruptPage", "TraceError"} <= names
    assert len(names) > 15


@pytest.mark.parametrize("kind", exceptions(), ids=lambda kind: kind.__name__)
def test_they_survive_pickling(kind: type[BaseException]) -> None:
    error = made(kind)
    error.add_note("seen by rank 3")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (again.args, str(again), vars(again)) == (error.args, str(error), vars(error))


def test_what_they_know_survives_too() -> None:
    budget = InfeasibleBudget("too small", minimum=12345)
    page = CorruptPage("torn", tier="host", slot=3, page=4, tensor="weight")
    assert pickle.loads(pickle.dumps(budget)).minimum == 12345
    assert vars(pickle.loads(pickle.dumps(page))) == vars(page)
