"""``tensorpager import`` and ``show``."""

import json
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tensorpager.planner.trace import make_trace
from tensorpager.planner.trace_file import write_trace

from .command_line import PAGE, run, run_json, weight_trace

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
    assert [tensor["tensor"] for tensor in found["largest"]] == [1]
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
