"""The tests of these tests: each wait of the runtime, taken away, is found by one case."""

import pytest

from .device import Machine
from .mutants import MUTANTS, found

pytestmark = pytest.mark.simulated
QUICK = {
    "an out-copy waits for no op",
    "a copy waits for no mark",
    "the host does not wait for a mark",
}


@pytest.mark.parametrize("name", MUTANTS)
def test_every_fault_can_be_made(name: str) -> None:
    """Its line is there, once: what is slow to run is not slow to break."""
    compile(MUTANTS[name].broken(), name, "exec")


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param(MUTANTS.keys() - QUICK, marks=pytest.mark.slow)]
)
def test_faults_are_found(machine: Machine, names: set[str]) -> None:
    mutants = {name: MUTANTS[name] for name in sorted(names)}
    findings = dict(zip(mutants, found(list(mutants.values())), strict=True))
    print(*(f"{name}: {finding}" for name, finding in findings.items()), sep="\n")
    assert [name for name, finding in findings.items() if finding.how is None] == []


@pytest.mark.slow
def test_nothing_is_found_where_there_is_no_fault(machine: Machine) -> None:
    """Where the line is left as it is."""
    cases = {mutant.case: mutant._replace(fault=mutant.line) for mutant in MUTANTS.values()}
    findings = dict(zip(cases, found(list(cases.values())), strict=True))
    assert {case: finding for case, finding in findings.items() if finding.how} == {}
