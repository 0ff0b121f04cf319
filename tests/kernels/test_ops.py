"""Every page kernel as an op: `opcheck` on all, by the reference and by the interpreter."""
import pytest, torch
from ops_cases import CASES, ops

@pytest.mark.parametrize("name", CASES)
def test_opcheck(name):
    torch.library.opcheck(getattr(ops, name).default, CASES[name]())
