"""The picture of memory over time, drawn by hand and at every width."""

from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from tensorpager.planner.commands.chart import KIND_LOOKS, MemoryChart, fullest

GiB = 1 << 30
# 4 s: 2 GiB of parameters, and 2 GiB of activations in the third second.
CHART = MemoryChart(
    np.arange(4) * 1e6,
    4e6,
    {"activation": np.array([0, 0, 2 * GiB, 0]), "parameter": np.full(4, 2 * GiB)},
    "4.00 GiB at op 2",
    "relu",
)


def drawn(chart: MemoryChart, width: int) -> list[str]:
    return [line.plain.rstrip() for line in chart.lines(width, colour=False)]


def test_by_hand() -> None:
    assert drawn(CHART, 32) == [
        "         4.00 GiB at op 2 'relu'",
        "                    ▼",
        *["  4 GiB┤            ░░░░░░", *["       │            ░░░░░░"] * 2],
        *["  3 GiB┤            ░░░░░░", *["       │            ░░░░░░"] * 2],
        *["  2 GiB┤" + "█" * 24, *["       │" + "█" * 24] * 2],
        *["  1 GiB┤" + "█" * 24, *["       │" + "█" * 24] * 2],
        "      0└───────────┴───────────┴",
        "       0          2 s        4 s",
        "        █ parameter",
        "        ░ activation",
    ]


def test_a_device_is_a_line_across() -> None:
    with_device = drawn(replace(CHART, limit_bytes=2.5 * GiB), 60)
    row = next(line for line in with_device if "device" in line)
    assert row == " device┤" + "─" * 52
    above, below = with_device[with_device.index(row) - 1], with_device[with_device.index(row) + 1]
    assert above.count("░") == 13
    assert "█" not in above
    assert below.count("█") in (0, 52)
    assert "device" not in "".join(drawn(replace(CHART, limit_bytes=40 * GiB), 60))


def test_one_kind_shows_eighths_without_colour() -> None:
    ramp = replace(CHART, levels={"input": np.array([1, 2, 3, 4]) * GiB // 8})
    assert set("".join(drawn(ramp, 60))) & set("▁▂▃▄▅▆▇")


@pytest.mark.parametrize("width", [40, 41, 57, 80, 133, 250])
def test_fits(width: int) -> None:
    rng = np.random.default_rng(width)
    for peak in (1, 7, 1023, 5_000_000, 3 << 40):
        levels = {kind: rng.integers(0, peak, 500, endpoint=True) for kind in KIND_LOOKS}
        starts = np.cumsum(rng.random(500) * 3e6)
        chart = MemoryChart(starts, 3e9, levels, "9.99 GiB at op 123", "n\x1b" * 90, peak / 2)
        lines = drawn(chart, width)
        assert max(map(len, lines)) <= width
        assert "\x1b" not in "".join(lines)
        assert all(f" {kind}" in " ".join(lines[-3:]) for kind in levels)


def test_colour_follows_the_console() -> None:
    def printed(**options: object) -> str:
        console = Console(file=StringIO(), width=60, legacy_windows=False, **options)  # type: ignore[arg-type]
        with console.capture() as capture:
            console.print(CHART)
        return capture.get()

    colourful = printed(force_terminal=True, color_system="standard")
    assert "\x1b[32m█" in colourful
    assert "░" not in colourful
    for plain in (printed(), printed(force_terminal=True, no_color=True)):
        assert "\x1b" not in plain
        assert "░" in plain


def test_nothing_and_no_time() -> None:
    nothing = MemoryChart(np.zeros(1), 0.0, {}, "0 B at op 0", unit="ops")
    assert len(drawn(nothing, 80)) >= 9
    ops = MemoryChart(np.arange(3.0), 3.0, {"input": np.array([1, 5, 2])}, unit="ops")
    assert "op 1" in "".join(drawn(ops, 80))


def test_the_fullest_moment_of_each_piece_is_kept() -> None:
    """The third moment takes no time and is the highest; it ends the first of two pieces, so it is
    in the second one."""
    starts = np.array([0.0, 1.0, 5.0, 5.0])
    got = fullest(starts, 10.0, {"input": np.array([3, 4, 9, 1])}, 2)
    assert got.at.tolist() == [1, 2]
    assert got.levels["input"].tolist() == [4, 9]
    rng = np.random.default_rng(0)
    for pieces in (1, 7, 100):
        times = np.cumsum(rng.choice([0.0, 0.0, 1.0, 9.0], 300))
        level = rng.integers(0, 10**6, 300)
        end = float(times[-1] + rng.choice([0.0, 3.0]))
        got = fullest(times - times[0], end - times[0], {"input": level}, pieces)
        assert got.levels["input"].max() == level.max()
