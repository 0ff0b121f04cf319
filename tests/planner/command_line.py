"""The command line as tests run it, and the small trace and machine that they run it on."""

import json
from dataclasses import fields
from typing import Any

from click.testing import CliRunner, Result

from tensorpager.pager.cli import main
from tensorpager.planner.plan import Move, Predicted
from tensorpager.planner.trace import Trace, make_trace

PAGE = 1000
HARDWARE = """
device_bytes = 4000
host_bytes = 1000000
disk_bytes = "inf"
d2h_bytes_per_s = 1e8
h2d_bytes_per_s = 1e8
disk_read_bytes_per_s = 25e6
disk_write_bytes_per_s = 25e6
page_size = 1000
"""  # a page takes 10 µs on the link
PREDICTED = {item.name for item in fields(Predicted)} | {"percent_of_ideal"}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def run_json(*arguments: object) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def refused(*arguments: object) -> str:
    """The one line that a bad input ends with."""
    result = run(*arguments)
    assert result.exit_code == 2, (result.exit_code, result.stdout, result.exception)
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.count("\n") == 1
    return result.stderr


def weight_trace() -> Trace:
    """A weight of 2 pages, idle while an activation of 4 pages is written: 30 µs if all fits."""
    return make_trace(
        [(0, 2 * PAGE, True), (1, 4 * PAGE, False)],
        [("forward", 10.0, [0], []), ("fill", 10.0, [], [1]), ("update", 10.0, [0], [])],
        page_size=PAGE,
        names={0: "weight"},
        source="by hand",
    )


# In 4 frames: the weight leaves (clean after the first iteration), comes back in 2 · 10 µs.
MOVES = [Move(0, 0, 2, "host", "out", 1), Move(0, 0, 2, "host", "in", 2)]
