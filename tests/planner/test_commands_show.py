"""``tensorpager import`` and ``show``."""

import json
import os
import stat
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tensorpager.planner import trace as trace_module
from tensorpager.planner.commands import show
from tensorpager.planner.commands.options import EXAMPLE_TRACE
from tensorpager.planner.commands.show_groups import module_of
from tensorpager.planner.hardware import load_hardware
from tensorpager.planner.trace import Trace, make_trace
from tensorpager.planner.trace_file import write_trace

from .command_line import MOVES, PAGE, refused, run, run_json, weight_trace

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


def test_show_by_hand(trace_path: Path) -> None:
    found = run_json("show", trace_path, "--top", 1)
    assert found["ops"] == 3
    assert found["ideal_us"] == 30.0
    assert found["peak"] == {
        "live_bytes": 6 * PAGE,
        "live_page_bytes": 6 * PAGE,
        "op": 1,
        "op_name": "fill",
        "bytes_by_kind": {"parameter": 2 * PAGE, "activation": 4 * PAGE},
    }
    assert found["working_set"] == {"page_bytes": 4 * PAGE, "op": 1, "op_name": "fill"}
    assert found["read_only"] == {"tensors": 1, "bytes": 2 * PAGE, "share_of_bytes": 1 / 3}
    assert found["idle"]["periods"] == 1  # the weight while 'fill' runs, 10 of 30 µs
    assert found["idle"]["mean_bytes"] == pytest.approx(2 * PAGE / 3)
    assert found["idle"]["mean_live_bytes"] == pytest.approx(2 * PAGE + 4 * PAGE / 3)
    assert found["idle"]["by_length"][0]["bytes"] == 2 * PAGE
    assert [tensor["touched_bytes"] for tensor in found["hottest"]] == [4 * PAGE]


def test_show_sorts_idle_periods_by_length_and_goes_around_the_end(tmp_path: Path) -> None:
    """Tensor 0 lies idle for 99 µs, then for 1,000 + 1 µs around the iteration's end; tensor 1 is
    never idle, being used once and gone."""
    write_trace(
        tmp_path / "t.parquet",
        make_trace(
            [(0, 1500, True), (1, 10, False)],
            [
                ("a", 1.0, [], []),
                ("b", 5.0, [0], []),
                ("c", 99.0, [], [1]),
                ("d", 5.0, [0], []),
                ("e", 1000.0, [], []),
            ],
            page_size=PAGE,
        ),
    )
    idle = run_json("show", tmp_path / "t.parquet")["idle"]
    lengths = {line["from_us"]: (line["periods"], line["bytes"]) for line in idle["by_length"]}
    assert lengths == {
        0: (1, 1500),
        100: (0, 0),
        1e3: (1, 1500),
        1e4: (0, 0),
        1e5: (0, 0),
        1e6: (0, 0),
    }
    assert idle["mean_bytes"] == pytest.approx(1500 * 1100 / 1110)


def test_show_counts_what_partial_accesses_touch(tmp_path: Path) -> None:
    whole = weight_trace()
    first, count = whole.access_first_page.copy(), whole.access_page_count.copy()
    first[0], count[0] = 1, 1  # 'forward' reads the second page of the weight only
    write_trace(
        tmp_path / "t.parquet",
        replace(
            whole,
            access_first_page=first,
            access_page_count=count,
            tensor_bytes=np.array([2 * PAGE - 300, 4 * PAGE]),
        ),
    )
    found = run_json("show", tmp_path / "t.parquet")
    weight = next(tensor for tensor in found["hottest"] if tensor["tensor"] == 0)
    assert weight["touched_bytes"] == 700 + 1700
    # Page 0 is used by 'update' alone: idle for the 20 µs of the others. Page 1: for 10 µs.
    assert found["idle"]["mean_bytes"] == pytest.approx((1000 * 20 + 700 * 10) / 30)


def test_show_fits_80_columns_whatever_the_names(tmp_path: Path) -> None:
    names = {i: f"encoder.\x1b[31mlayers\n.{i}." + "weight" * 20 for i in range(3)}
    long = make_trace(
        [(i, 10**12 + i, i == 0) for i in range(3)],
        [("op" * 90, 1e9, [0], [1]), ("op" * 90, 1e9, [1], [2])],
        page_size=2 << 20,
        names=names,
        source="s" * 200,
    )
    write_trace(tmp_path / "t.parquet", long)
    result = run("show", tmp_path / "t.parquet")
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "\x1b" not in result.stdout
    assert result.stdout.count("weight  ") == 6  # each name's end, in two lists


def test_show_says_what_makes_the_peak(trace_path: Path) -> None:
    found = run_json("show", trace_path)
    assert found["peak_tensors_count"] == 2
    fill, weight = found["peak_tensors"]
    assert (fill["tensor"], fill["share"], fill["in_use"]) == (1, 2 / 3, True)
    assert (weight["tensor"], weight["name"], weight["in_use"]) == (0, "weight", False)
    assert weight["idle_us"] == 10.0


def test_show_sets_idle_bytes_against_a_link(trace_path: Path, machine_path: Path) -> None:
    """A page takes 10 µs each way, and the weight is idle for 10 µs."""
    idle = run_json("show", trace_path)["idle"]
    assert (idle["hideable_bytes"], idle["link_bytes"]) == (None, None)
    hardware = ("--hardware", machine_path)
    for rate, hidden in (("1e8", 0), ("200000000", PAGE), ("1GB", 2 * PAGE)):
        if rate != "1e8":
            hardware = ("--hardware", machine_path, "--d2h", rate, "--h2d", rate)
        idle = run_json("show", trace_path, *hardware)["idle"]
        assert idle["hideable_bytes"] == hidden
        assert idle["by_length"][0]["hideable_bytes"] == hidden
    assert idle["link_bytes"] == 30_000  # 1 GB/s for 30 µs
    late = run_json("show", trace_path, *hardware, "--latency-us", 4.5)["idle"]
    assert late["hideable_bytes"] == 0
    shown = run("show", trace_path, *hardware).stdout
    assert "link hides" in shown
    assert " device┤──" in shown
    assert "--hardware NAME says" in run("show", trace_path).stdout


def test_show_only_some_kinds(trace_path: Path) -> None:
    found = run_json("show", trace_path, "--kind", "parameter")
    assert found["kinds"] == ["parameter"]
    assert found["peak"]["bytes_by_kind"] == {"parameter": 2 * PAGE}
    assert [tensor["tensor"] for tensor in found["hottest"]] == [0]
    assert found["read_only"]["share_of_bytes"] == 1.0
    both = run_json("show", trace_path, "--kind", "parameter", "--kind", "activation")
    assert both["peak"] == run_json("show", trace_path)["peak"]
    none = run("show", trace_path, "--kind", "optimizer")
    assert none.exit_code == 0, none.exception
    assert "'--kind'" in refused("show", trace_path, "--kind", "weights")


def layered_trace() -> Trace:
    """Two layers of a weight, its gradient and what is saved for backward, with odd names."""
    names = {
        0: "layers.0.attn.weight",
        1: "layers.1.attn.weight",
        2: "layers.0.attn:saved.0",
        3: "layers.0.attn.weight.grad",
        4: "<b>ünï cødé</b> \x1b[31m\n& sons",
    }
    kinds = {2: "activation", 3: "gradient", 4: "workspace"}
    sizes = {0: 4000, 1: 4000, 2: 2500, 3: 1000, 4: 1, 5: 700}
    return make_trace(
        [(i, size, i < 2) for i, size in sizes.items()],
        [
            ("mm", 10.0, [0], [2]),
            ("mm", 10.0, [1], [4]),
            ("relu", 0.0, [2, 4], [5]),
            ("mm_backward", 30.0, [2, 5], [3]),
            ("step", 10.0, [3], [0, 1]),
        ],
        page_size=PAGE,
        names=names,
        kinds=kinds,
    )


@pytest.mark.parametrize(
    ("by", "live", "hot"),
    [
        (
            "module",
            [("layers.0.attn", 3, 7500), ("layers.1.attn", 1, 4000), ("(no name)", 1, 700)],
            ("layers.0.attn", 7),
        ),
        (
            "kind",
            [("parameter", 2, 8000), ("activation", 2, 3200), ("gradient", 1, 1000)],
            ("parameter", 4),
        ),
        ("op", [("(persistent)", 2, 8000), ("mm", 1, 2500), ("mm_backward", 1, 1000)], ("mm", 4)),
    ],
)
def test_show_by(
    by: str, live: list[tuple[str, int, int]], hot: tuple[str, int], tmp_path: Path
) -> None:
    """The peak is at 'mm_backward': the weights, a gradient, what was saved, and one unnamed."""
    path = tmp_path / "t.parquet"
    write_trace(path, layered_trace())
    found = run_json("show", path, "--by", by)
    assert found["peak"]["live_bytes"] == 12200
    groups = found["groups"]
    assert groups["by"] == by
    assert [(g["group"], g["tensors"], g["bytes"]) for g in groups["at_peak"]][:3] == live
    assert sum(group["share"] for group in groups["at_peak"]) == pytest.approx(1.0)
    assert sum(g["tensors"] for g in groups["at_peak"]) == found["peak_tensors_count"] == 5
    if by == "op":
        assert sum(group["accesses"] for group in groups["hottest"]) == found["accesses"]
    assert (groups["hottest"][0]["group"], groups["hottest"][0]["accesses"]) == hot
    text = run("show", path, "--by", by, "--top", 1)
    assert text.exit_code == 0
    assert "--top lists more" in text.stdout
    assert "\x1b" not in text.stdout


def test_module_names() -> None:
    assert module_of("layers.3.attn.weight", "parameter") == "layers.3.attn"
    assert module_of("layers.3.attn.weight +2 more", "parameter") == "layers.3.attn"
    assert module_of("layers.3.attn.weight.grad", "gradient") == "layers.3.attn"
    assert module_of("layers.3.attn.weight.exp_avg", "optimizer") == "layers.3.attn"
    assert module_of("GPT[0].h.1:saved.12", "activation") == "GPT[0].h.1"
    assert module_of("weight", "parameter") == module_of("weight.grad", "gradient") == "(top)"
    assert module_of("dense", "workspace") == "dense"
    assert module_of(None, "activation") == module_of("", "input") == "(no name)"


@pytest.mark.parametrize("durations", [1.0, 0.0])
def test_show_the_smallest_traces(durations: float, tmp_path: Path, machine_path: Path) -> None:
    path = tmp_path / "t.parquet"
    for tensors in ([], [(0, 1, False)], [(0, 1, True)]):
        ids = [identity for identity, _, _ in tensors]
        write_trace(path, make_trace(tensors, [("only", durations, ids, [])], page_size=PAGE))
        found = run_json("show", path, "--hardware", machine_path)
        assert found["peak"]["live_bytes"] == len(tensors)
        for more in ((), ("--hardware", machine_path), ("--top", 0)):
            result = run("show", path, *more)
            assert result.exit_code == 0, result.exception
            assert max(map(len, result.stdout.splitlines())) <= 80


def test_show_says_what_options_need(trace_path: Path) -> None:
    assert show.KINDS == trace_module.KINDS
    assert "--kind" in refused("show", trace_path, "--tensor", 0, "--kind", "input")
    assert "--hardware" in refused("show", trace_path, "--h2d", "5GB")
    assert "p.json" in refused("show", trace_path, "--plan", "p.json", "--hardware", "g10")
    assert "p.json: no such file" in refused("show", trace_path, "--plan", "p.json")
    other = run_json("show", trace_path, "--page-size", 500, "--hardware", "g10")
    assert other["page_size"] == 500


@pytest.mark.slow
def test_show_is_quick_on_long_traces(tmp_path: Path) -> None:
    """100,000 ops, 300,000 accesses, 45,000 tensors: within a minute even where everything is slow
    (some 1.5 s usually)."""
    rng = np.random.default_rng(0)
    ops, tensors = 100_000, 45_000
    birth = rng.integers(0, ops - 1, tensors)
    length = np.where(rng.random(tensors) < 0.3, 50_000, rng.geometric(1 / 20, tensors))
    death = np.minimum(birth + length, ops - 1)
    uses = [[] for _ in range(ops)]  # type: list[list[int]]
    for tensor, (first, last) in enumerate(zip(birth.tolist(), death.tolist())):
        for op in {first, last, *rng.integers(first, last, 5, endpoint=True).tolist()}:
            uses[op].append(tensor)
    trace = make_trace(
        [(t, int(size) + 1, t % 15 == 0) for t, size in enumerate(rng.lognormal(13, 2, tensors))],
        [(f"op{op % 99}", float(op % 7), mine, []) for op, mine in enumerate(uses)],
        page_size=2 << 20,
        names={t: f"layers.{t % 50}.attn.{t}" for t in range(tensors)},
    )
    write_trace(tmp_path / "t.parquet", trace)
    begin = time.process_time()
    assert run("show", tmp_path / "t.parquet", "--by", "module").exit_code == 0
    assert time.process_time() - begin < 60


@pytest.mark.skipif(not SHARED.exists(), reason="the public traces are not beside the repository")
def test_import_of_a_public_workload(tmp_path: Path) -> None:
    out = tmp_path / "bert.parquet"
    result = run("import", "g10", SHARED / "g10" / "bert-256.json.gz", "-o", out)
    assert result.exit_code == 0, result.stderr
    assert "1369 ops" in result.stdout
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert run_json("show", out)["ideal_us"] == pytest.approx(7285466.083, abs=0.01)


def test_import_takes_the_page_size(tmp_path: Path) -> None:
    source = tmp_path / "tiny.json"
    document = {
        "schema": "g10-neutral-1",
        "tensors": [[7, 300_000, True]],
        "kernels": [[0, "Conv", 5.0, 5.0, 5.0, 0, [7], []]],
        "total_us": 5.0,
    }
    source.write_text(json.dumps(document))
    out = tmp_path / "tiny.parquet"
    assert run("import", "g10", source, "-o", out, "--page-size", "64KiB").exit_code == 0
    assert run_json("show", out)["page_size"] == 65536


# --- the verdict, and the sample in the package ---------------------------------------------------


def test_the_verdict_comes_first(trace_path: Path, machine_path: Path) -> None:
    assert run_json("show", trace_path)["verdict"] == {
        "needs_bytes": 6 * PAGE,
        "smallest_device_bytes": 4 * PAGE,
        "machine": None,
    }
    lines = run("show", trace_path).stdout.splitlines()
    assert lines[0] == "It needs 5.86 KiB; the smallest device budget is 3.91 KiB."
    assert "--device-bytes 50%" in lines[1]
    # In 4 frames the weight leaves clean and comes back: 20 µs on top of 30.
    found = run_json("show", trace_path, "--hardware", machine_path)["verdict"]["machine"]
    assert found["device_bytes"] == 4 * PAGE
    assert found["percent_of_ideal"] == pytest.approx(60.0)
    lines = run("show", trace_path, "--hardware", machine_path).stdout.splitlines()
    assert lines[1] == "A device of 3.91 KiB runs it at 60.0 % of the speed, planned."
    small = run("show", trace_path, "--hardware", machine_path, "--device-budget", 2 * PAGE)
    assert small.exit_code == 0
    assert "cannot run it: op 1 'fill' alone needs" in small.stdout.splitlines()[1]


def test_the_sample_stands_for_a_trace_anywhere_on_the_line() -> None:
    some = ["--hardware", "g10"]  # where nothing has to move
    found = run_json("show", "--example", *some)
    assert found == run_json("show", EXAMPLE_TRACE, *some)
    assert found["tensors"] > 100
    assert EXAMPLE_TRACE.stat().st_size < 100_000
    assert run_json("show", *some, "--top", 1, "--example")["ops"] == found["ops"]
    assert "--example" in run("show", "--help").stdout
    assert "no such file" in refused("show", "--exampl.parquet".strip("-"))


def test_without_a_machine_it_runs_on_a_cpu_with_half(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_trace(path, replace(weight_trace(), device="cpu"))
    asked = ["show", path]
    found = run_json(*asked)["verdict"]
    half = max(found["smallest_device_bytes"], found["needs_bytes"] // 2 // PAGE * PAGE)
    machine = ("--hardware", "cpu", "--device-bytes", half, "--page-size", PAGE)
    named = run_json(*asked, *machine)["verdict"]
    assert found["machine"] == named["machine"] | {"assumed": "cpu"}
    assert run(*asked).stdout.splitlines()[1].endswith("of the speed, planned, on a CPU.")
    write_trace(path, replace(weight_trace(), device="cuda:0"))
    assert "--hardware NAME" in run(*asked).stdout.splitlines()[1]


def test_a_plan_on_another_machine_is_told(
    trace_path: Path, machine_path: Path, save_plan: Callable[..., Path]
) -> None:
    plan_path = save_plan(MOVES, hardware=load_hardware(str(machine_path)))
    for words in (["simulate"], ["html", "--no-remedies", "-o", os.devnull], ["show", "--plan"]):
        asked = [words[0], trace_path, *words[1:], plan_path]
        assert run(*asked).stderr == ""
        said = run(*asked, "--h2d", "1GB").stderr
        assert said.startswith(f"tensorpager: warning: {plan_path} was made for another machine: ")


def test_durations_of_another_machine_are_told_with_the_ratio(tmp_path: Path) -> None:
    """By data sheet: 312 and 19.5 TFLOP/s for an A100, 1 for the CPU, 165.2 and 82.6 for a 4090."""

    def told(device: str, machine: str) -> str:
        path = tmp_path / "t.parquet"
        write_trace(path, replace(weight_trace(), device=device))
        said = {run(*words, "--hardware", machine).stderr for words in commands(path)}
        assert len(said) == 1
        return said.pop()

    def commands(path: Path) -> list[list[str | Path]]:
        out = tmp_path / "out"
        return [
            ["show", path],
            ["plan", path, "--quick", "-o", out],
            ["compare", path, "--quick", "--policies", "lru"],
            ["simulate", path, "--sweep", "device=1GiB", "--policies", "lru", "--quick"],
        ]

    said = "as recorded on cpu, not on a100: that computes 19.5 to 312 times as fast by data sheet"
    assert said in told("cpu", "a100")
    said = told("NVIDIA GeForce RTX 4090", "a100")
    assert "not on a100: that computes 0.236 to 1.89 times as fast by data sheet" in said
    assert "hides more" in told("NVIDIA H200", "a100")
    assert "as recorded on cuda:0, not on cpu: ops are slower there" in told("cuda:0", "cpu")
    for device, machine in (("cuda:0", "a100"), ("cpu", "cpu"), ("A100", "g10"), ("", "a100")):
        assert "as recorded on" not in told(device, machine)
