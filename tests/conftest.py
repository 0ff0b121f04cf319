"""What holds for every test, and the conformance suites' sample counts: added up over xdist workers
and printed at the end."""

import ctypes
import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# The same examples everywhere, and no test fails because a machine is busy.
settings.register_profile("tensorpager", derandomize=True, deadline=None)
settings.load_profile("tensorpager")

# A shell that starts the tests in the background ignores Ctrl-C for them, and programs that they
# start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Key: (suite, lane, dtype, outcome, detail); value: number of samples. A detail is the name of the
# op, module or optimizer, with "reason: " before it if there is one, or nothing.
Tally = Counter[tuple[str, str, str, str, str]]
TALLY = pytest.StashKey[Tally]()
ALLOCATOR = "TENSORPAGER_ALLOCATOR"
OUTCOMES = ("passed", "within bound", "raised alike", "not comparable", "left out", "failed")


FAKE_CUDA = hasattr(ctypes.CDLL(None), "fakecuda_counts")  # tests/fakecuda is loaded


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TALLY] = Counter()
    gc.disable()


def pytest_collection_finish() -> None:
    """What collecting makes (thousands of tests, PyTorch's databases) lives to the end: nobody
    looks through it for garbage meanwhile, nor later, which took a fifth of a second each time."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[pytest.TestReport]:
    """On the fake CUDA a GPU test runs as far as it comes: where it finds a wrong value it is
    skipped, since kernels do nothing there. Every other error is a failure; so is a wrong value in
    a test that is marked ``gpu(values=False)``."""
    report = yield
    marker = item.get_closest_marker("gpu")
    if FAKE_CUDA and marker and marker.kwargs.get("values", True) and _is_a_wrong_value(call):
        path, line, _ = item.location
        report.outcome = "skipped"
        report.longrepr = (path, line, "Skipped: as far as the fake CUDA goes, which has no values")
    return report


# Of the extras of pyproject.toml: what a part of the tests is about, or uses.
OPTIONAL = ("accelerate", "expecttest", "peft", "psutil", "safetensors", "selenium", "transformers")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[pytest.CollectReport]:
    """A module that needs an optional package is skipped by the package's name."""
    report = yield
    excinfo = report.call.excinfo if report.failed else None
    error = excinfo.value.__cause__ if excinfo is not None else None
    if isinstance(error, ModuleNotFoundError) and error.name in OPTIONAL:
        report.outcome = "skipped"
        why = f"Skipped: needs {error.name}; pip install {error.name}"
        report.longrepr = (str(collector.path), 1, why)
    return report


def _is_a_wrong_value(call: pytest.CallInfo[None]) -> bool:
    """An assertion of a test failed, not one of ours; or a check of gradients."""
    if call.when != "call" or call.excinfo is None:
        return False
    if call.excinfo.type.__name__ == "GradcheckError":
        return True
    if call.excinfo.type is not AssertionError:
        return False
    place = str(call.excinfo.traceback[-1].path)
    return place.startswith(os.path.dirname(__file__)) or "torch/testing" in place


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Rates that tests measure stay out of the user's cache, in child processes too."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        if not os.environ.get(ALLOCATOR):  # built once for all sessions
            cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
            patch.setenv(ALLOCATOR, os.path.join(cache, "tensorpager"))
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.delenv("TENSORPAGER_CALIBRATION", raising=False)
        yield folder


@pytest.fixture(scope="session")
def shared_pagers() -> list[Any]:
    """Pagers that stay open from test to test, because a fixture for several tests owns them."""
    return []


@pytest.fixture(autouse=True)
def no_pager_stays_open(shared_pagers: list[Any]) -> Iterator[None]:
    """Close the pagers that a test opened and left open: their threads, hooks and memory would
    otherwise be there in later tests."""
    before = _open_pagers()
    yield
    for pager in _open_pagers():
        if not any(pager is kept for kept in (*before, *shared_pagers)):
            with suppress(Exception):  # a test may leave one whose disk or planner is broken
                pager.close()


def _open_pagers() -> list[Any]:
    """All of this process; none where no test has imported the runtime."""
    runtime = sys.modules.get("tensorpager.pager.api")
    pagers = list(runtime._open_pagers) if runtime else []
    return [pager for pager in pagers if pager.core.closed_reason is None]


@pytest.fixture(scope="session")
def tally(pytestconfig: pytest.Config) -> Tally:
    return pytestconfig.stash[TALLY]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        rows = [[*key, count] for key, count in session.config.stash[TALLY].items()]
        session.config.workeroutput["tally"] = rows


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    for *key, count in getattr(node, "workeroutput", {}).get("tally", []):
        node.config.stash[TALLY][tuple(key)] += count


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    tally = config.stash[TALLY]
    if tally:
        terminalreporter.section("conformance samples")
        for line in _table(tally):
            terminalreporter.write_line(line)


def _table(tally: Tally) -> Iterator[str]:
    heads = ("tried", *OUTCOMES)
    yield f"{'suite':12}{'lane':17}{'dtype':11}" + "".join(f"{head:>16}" for head in heads)
    groups: dict[tuple[str, str, str], Counter[str]] = {}
    details: dict[tuple[str, str, str], Counter[str]] = {}
    for (suite, lane, dtype, outcome, detail), count in tally.items():
        groups.setdefault((suite, lane, dtype), Counter())[outcome] += count
        if detail:
            reason, _, name = detail.rpartition(": ")
            details.setdefault((suite, outcome, reason), Counter())[name] += count
    total: Counter[str] = Counter()
    for key in sorted(groups):
        total += groups[key]
        yield _row(key, groups[key])
    yield _row(("total", "", ""), total)
    for suite, outcome, reason in sorted(details):
        names = sorted(details[suite, outcome, reason].items())
        why = f" because {reason}" if reason else ""
        yield f"{suite}, {outcome}{why}: " + ", ".join(f"{name} ({n})" for name, n in names)


def _row(key: tuple[str, str, str], outcomes: Counter[str]) -> str:
    cells = [outcomes.total(), *(outcomes[outcome] for outcome in OUTCOMES)]
    return "{:12}{:17}{:11}".format(*key) + "".join(f"{cell:>16,}" for cell in cells)
