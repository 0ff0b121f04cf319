"""``tensorpager show --tensor``: the life of one tensor, and what a plan does with it."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tensorpager.planner.hardware import load_hardware
from tensorpager.planner.plan import (
    DEVICE,
    DISCARD,
    Move,
    Plan,
    Recompute,
    StartRun,
    plan_to_json,
)
from tensorpager.planner.trace import make_trace
from tensorpager.planner.trace_file import write_trace

from .command_line import MOVES, PAGE, refused, run, run_json
from .random_plans import page_groups, random_trace


def test_a_life_by_hand(trace_path: Path) -> None:
    found = run_json("show", trace_path, "--tensor", "weight")
    assert found == {
        "tensor": 0,
        "name": "weight",
        "kind": "parameter",
        "nbytes": 2 * PAGE,
        "page_size": PAGE,
        "pages": 2,
        "persistent": True,
        "from_us": 0.0,
        "to_us": 30.0,
        "iteration_us": 30.0,
        "accesses": [
            {
                "op": op,
                "op_name": name,
                "access": "read",
                "first_page": 0,
                "page_count": 2,
                "start_us": 10.0 * op,
                "end_us": 10.0 * op + 10.0,
            }
            for op, name in ((0, "forward"), (2, "update"))
        ],
        "gaps": [
            {
                "from_op": 0,
                "to_op": 2,
                "first_page": 0,
                "page_count": 2,
                "begin_us": 10.0,
                "idle_us": 10.0,
                "bytes": 2 * PAGE,
                "hideable_bytes": None,
            }
        ],
        "plan": None,
    }
    passing = run_json("show", trace_path, "--tensor", 1)
    assert (passing["from_us"], passing["to_us"], passing["gaps"]) == (10.0, 20.0, [])
    text = run("show", trace_path, "--tensor", "weight").stdout
    assert "persistent" in text


def test_what_a_plan_does_with_it(
    trace_path: Path, machine_path: Path, save_plan: Callable[..., Path]
) -> None:
    """As test_timeline.py has it: the copy stays good, so leaving costs no time; coming back takes
    20 µs, for which 'update' waits."""
    hardware = ("--plan", save_plan(MOVES), "--hardware", machine_path)
    found = run_json("show", trace_path, "--tensor", "weight", *hardware)
    assert found["iteration_us"] == 50.0
    assert [access["start_us"] for access in found["accesses"]] == [0.0, 40.0]
    assert found["gaps"][0]["idle_us"] == 30.0
    assert found["gaps"][0]["hideable_bytes"] == PAGE
    plan = found["plan"]
    assert [(m["action"], m["queued_us"], m["begin_us"], m["end_us"]) for m in plan["moves"]] == [
        ("out", 10.0, None, None),
        ("in", 20.0, 20.0, 40.0),
    ]
    assert [(s["place"], s["begin_us"], s["end_us"]) for s in plan["residency"]] == [
        ("device", 0.0, 10.0),
        ("host", 10.0, 20.0),
        ("coming", 20.0, 40.0),
        ("device", 40.0, 50.0),
    ]
    assert plan["share_of_time_on_device"] == pytest.approx(20 / 50)
    assert [stall["op_name"] for stall in plan["stalls"]] == ["update"]
    text = run("show", trace_path, "--tensor", "weight", *hardware).stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "Ops that wait for it" in text
    assert "40.0 % of its time (by hand)" in text
    assert "Moves" not in run("show", trace_path, "--tensor", 1, *hardware).stdout


def test_what_is_made_again_and_what_the_host_steps(tmp_path: Path, machine_path: Path) -> None:
    """An activation of two pages that leaves without a copy; a weight that the host steps."""
    trace = make_trace(
        [(0, 2 * PAGE, False), (1, PAGE, True), (2, PAGE, False)],
        [
            ("block.3.forward", 10.0, [], [0]),
            ("block.3.backward", 10.0, [0], [2]),
            ("block.3.update", 10.0, [1, 2], [1]),
        ],
        page_size=PAGE,
        names={0: "block.3.out", 1: "block.3.weight"},
        rerun=[True, False, False],
        host_us=[math.nan, math.nan, 20.0],
    )
    write_trace(tmp_path / "t.parquet", trace)
    moves = [Move(0, 0, 2, DEVICE, DISCARD, 1), Move(2, 0, 1, "host", "out", 2)]
    plan = Plan(
        *("by hand", PAGE, 4 * PAGE, 1_000_000, 0, moves, [StartRun(1, 0, 1, "host")]),
        recompute=[Recompute(0, 0, 1)],
        host_steps=[2],
        hardware=load_hardware(str(machine_path)),
    )
    (tmp_path / "p.json").write_text(json.dumps(plan_to_json(plan)))
    command = ("show", tmp_path / "t.parquet", "--plan", tmp_path / "p.json")
    out = run_json(*command, "--tensor", "block.3.out")["plan"]
    assert [(row["op"], row["before_op"]) for row in out["made_again"]] == [(0, 1)]
    assert (out["host_steps"], out["deferred"]) == ([], [])
    weight = run_json(*command, "--tensor", "block.3.weight")["plan"]
    assert [(row["op"], row["end_us"] - row["begin_us"]) for row in weight["host_steps"]] == [
        (2, 20.0)
    ]
    assert weight["residency"][0]["place"] == "host"
    text = run(*command, "--tensor", "block.3.weight").stdout
    assert "Steps of the host that use it" in text
    assert "Made again" in run(*command, "--tensor", "block.3.out").stdout
    found = run_json(*command)
    assert found["choices"] == {"rerun_ops": 1, "rerun_us": 10.0, "host_ops": 1, "host_us": 20.0}
    layer = found["verdict"]["machine"]["layers"][-1]
    assert (layer["discarded_bytes"], layer["host_steps"]) == (2 * PAGE, 1)
    text = run(*command).stdout
    assert "what the plan (by hand) does" in text
    assert "1 ops may run again" in text


def test_plans_that_do_not_fit(
    trace_path: Path, machine_path: Path, save_plan: Callable[..., Path]
) -> None:
    arguments = ("show", trace_path, "--tensor", 0, "--hardware", machine_path)
    missing = save_plan([Move(0, 0, 2, "host", "out", 1)])
    assert "infeasible" in refused(*arguments, "--plan", missing)
    other = save_plan(MOVES, trace_sha256="f" * 64)
    assert "another trace" in refused(*arguments, "--plan", other)
    assert "--page-size 1000" in refused(
        *arguments, "--plan", save_plan(MOVES), "--page-size", 2000
    )
    assert "nothing.json" in refused(*arguments, "--plan", "nothing.json")


def test_names(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    names = {0: "layers.0.attn.weight", 1: "layers.1.attn.weight", 2: "5", 3: "ünï <b>\x1b[31m"}
    names |= {4: "twice", 5: "twice", 6: "layers.1"}
    trace = make_trace(
        [(number, 100, False) for number in range(8)],
        [("op", 1.0, list(range(8)), [])],
        page_size=PAGE,
        names=names,
        metadata={"shared": {"6": ["layers.1", "bias.of.it"]}},
    )
    write_trace(path, trace)

    def number(text: object) -> int:
        return int(run_json("show", path, "--tensor", text)["tensor"])

    assert number("layers.0.attn.weight") == 0
    assert number("ATTN.weight".replace("ATTN", "1.ATTN")) == 1  # the only one with it inside
    assert number(5) == 5  # numbers before names
    assert number("layers.1") == 6  # all of a name before parts of one
    assert number("bias.of.it") == 6
    assert number("<b>") == 3
    assert "\x1b" not in run("show", path, "--tensor", 3).stdout
    assert "4 (twice), 5 (twice)" in refused("show", path, "--tensor", "twice")
    line = refused("show", path, "--tensor", "attn")
    assert "2 tensors match 'attn'" in line
    assert "0 (layers.0.attn.weight), 1 " in line
    line = refused("show", path, "--tensor", "layers.1.atn.weight")
    assert "no tensor matches" in line
    assert "0 (layers.0.attn.weight), 1 (layers.1.attn.weight)" in line
    assert "\x1b" not in refused("show", path, "--tensor", "\x1b" * 300)
    assert "no tensor matches" in refused("show", path, "--tensor", 99)
    assert "no tensor matches" in refused("show", path, "--tensor", "9" * 5000)


def test_without_names_there_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_trace(path, make_trace([(7, 1, True)], [("op", 1.0, [7], [])], page_size=PAGE))
    assert "no tensor matches" in refused("show", path, "--tensor", "weight")
    assert "(no name)" in run("show", path, "--tensor", 7).stdout


def test_long_lists_are_shortened(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    ops = [("use", 1.0, [0] if number % 2 else [], []) for number in range(100)]
    write_trace(path, make_trace([(0, 1, True)], ops, page_size=PAGE))
    text = run("show", path, "--tensor", 0).stdout
    assert "Accesses (5 of 50)" in text
    assert "(5 of" not in run("show", path, "--tensor", 0, "--top", 50).stdout
    assert run("show", path, "--tensor", 0, "--top", 0).exit_code == 0
    assert len(run_json("show", path, "--tensor", 0)["accesses"]) == 50


def test_gaps_of_parts_are_those_of_their_pages(tmp_path: Path) -> None:
    """Against every page's uses, counted one by one."""
    path = tmp_path / "t.parquet"
    compared = 0
    for seed in range(8):
        trace = random_trace(Random(seed))
        write_trace(path, trace)
        for tensor in range(trace.tensors):
            found = run_json("show", path, "--tensor", int(trace.tensor_ids[tensor]))
            got = {
                (page, gap["from_op"], gap["to_op"])
                for gap in found["gaps"]
                for page in range(gap["first_page"], gap["first_page"] + gap["page_count"])
            }
            expected = set()
            for owner, begin, end, uses in page_groups(trace):
                if owner != tensor or not uses:
                    continue
                around = [uses[0] + trace.ops] if trace.tensor_persistent[tensor] else []
                for before, after in zip(uses, [*uses[1:], *around]):
                    if after > before + 1:
                        pages = range(begin, end)
                        expected |= {(page, before, after % trace.ops) for page in pages}
            assert got == expected
            compared += len(expected)
    assert compared > 30
