"""``bench_ranks.py``: what is made of what ranks found, and that ranks of all modes run."""

import json
import shutil
from pathlib import Path

import pytest
from bench_ranks import own_us, paced, spread_of, step_us, work_us
from lm.processes import ROOT

from tensorpager.planner.commands.options import EXAMPLE_TRACE
from tensorpager.planner.trace_file import read_trace

from .. import programs


def test_the_slowest_rank_of_each_step_counts() -> None:
    steps = [[1.0, 2.0, 9.0], [3.0, 1.0, 1.0]]
    found = {"ranks": [{"step_seconds": of_one, "own_seconds": of_one} for of_one in steps]}
    assert step_us(found) == 3e6, "of 3, 2 and 9 s"
    assert spread_of(found) == pytest.approx(1 / 3), "medians of 2 s and 1 s"
    assert spread_of({"ranks": found["ranks"][:1]}) == 0
    assert own_us(found) == 1.5e6


def test_own_work_is_what_planned_steps_take_beside_plain_ones() -> None:
    plain, planned = ({"ranks": [{"cpu_seconds": s} for s in of]} for of in ([1, 2, 9], [3, 2, 4]))
    assert work_us(planned, plain) == 1e6, "of 3 and 2 s"
    assert work_us(plain, planned) == 0.0


def test_ops_take_what_they_take_beside_other_ranks(tmp_path: Path) -> None:
    recorded = read_trace(EXAMPLE_TRACE)
    trace = shutil.copy(EXAMPLE_TRACE, tmp_path)
    found = read_trace(paced(Path(trace), 3 * recorded.ideal_us))
    assert found.ideal_us == pytest.approx(3 * recorded.ideal_us)
    assert found.op_names == recorded.op_names


@pytest.mark.slow
def test_ranks_of_all_modes(tmp_path: Path) -> None:
    script, out = str(ROOT / "scripts" / "bench_ranks.py"), tmp_path / "ranks.json"
    tiny = ["--preset=tiny", "--ranks=2", "--steps=2", "--seq=16", f"--json={out}"]
    loose = ["--share=60%", "--link-rate=50", "--within=1e9", "--faster=0"]
    programs.run(script, *tiny, *loose)
    (row,) = json.loads(out.read_text())["rows"]
    assert row["same_losses"]
    assert row["within_budget"]
    assert row["network"]["fabric"] > 0
    assert row["measured_us"].keys() == {"demand", "planned"}
    ended = programs.run(script, *tiny, "--fits", "--rounds=1", "--most=1e9")
    assert ended.returncode == 0, ended.stderr[-2000:]
    (row,) = json.loads(out.read_text())["rows"]
    assert row["same_losses"]
    assert len(row["of_pairs"]) == 1
