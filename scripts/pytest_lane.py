"""pytest for one lane of scripts/test: ``pytest_lane.py FILE ARGUMENTS...``.

As ``python -m pytest ARGUMENTS...``, and FILE gets a JSON object when the run has ended:
``outcomes`` (node id to "passed", "failed", "crashed" or "skipped"; "crashed" is a worker's end, or
a module that cannot be imported) and ``reasons`` (node id to why it was skipped).
"""

import json
import sys
from pathlib import Path

import pytest


class Outcomes:
    """Only in the process that was started; xdist hands it what its workers report."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outcomes: dict[str, str] = {}
        self.reasons: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid
        if report.failed:
            # xdist's report for a worker that is gone belongs to no phase of the test.
            crashed = report.when not in ("setup", "call", "teardown")
            self.outcomes[test] = "crashed" if crashed else self.outcomes.get(test, "failed")
            if self.outcomes[test] in ("passed", "skipped"):  # and then its teardown failed
                self.outcomes[test] = "failed"
        elif report.skipped:
            self.outcomes[test] = "skipped"
            self.reasons[test] = _reason(report)
        elif report.when == "call":
            self.outcomes[test] = "passed"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module that cannot be imported, or that is skipped as a whole."""
        if report.failed:
            self.outcomes[report.nodeid] = "crashed"
        elif report.skipped:
            self.outcomes[report.nodeid] = "skipped"
            self.reasons[report.nodeid] = _reason(report)

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps({"outcomes": self.outcomes, "reasons": self.reasons}))


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if hasattr(report, "wasxfail"):
        return f"expected to fail: {report.wasxfail}"
    said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return said.removeprefix("Skipped: ")


if __name__ == "__main__":
    sys.path[0] = str(Path.cwd())  # as python -m has it
    path, *arguments = sys.argv[1:]
    sys.exit(pytest.main(arguments, plugins=[Outcomes(Path(path))]))
