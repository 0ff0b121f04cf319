"""A small trace, a machine that is too small for it, and plans, as files."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tensorpager.planner.plan import Move, Plan, plan_to_json
from tensorpager.planner.trace_file import write_trace

from .command_line import HARDWARE, PAGE, weight_trace


@pytest.fixture
def trace_path(tmp_path: Path) -> Path:
    path = tmp_path / "trace.parquet"
    write_trace(path, weight_trace())
    return path


@pytest.fixture
def machine_path(tmp_path: Path) -> Path:
    path = tmp_path / "machine.toml"
    path.write_text(HARDWARE)
    return path


@pytest.fixture
def save_plan(tmp_path: Path) -> Callable[..., Path]:
    def save(moves: list[Move], **changes: Any) -> Path:
        plan = Plan("by hand", PAGE, 4 * PAGE, 10**6, float("inf"), moves)
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(plan_to_json(replace(plan, **changes))))
        return path

    return save
