"""What tests/conftest.py does for all tests."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_module_that_needs_an_optional_package_is_skipped_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "test_optional.py").write_text(
        "import sys\nsys.modules['expecttest'] = None\n"
        "import torch.testing._internal.common_utils\n"
    )
    (tmp_path / "test_needed.py").write_text("import no_such_package\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.conftest",
        "-p",
        "no:xdist",
        "-rsE",
    ]
    found = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert "needs expecttest; pip install expecttest" in found.stdout, found.stdout
    assert "no_such_package" in found.stdout
    assert "1 skipped, 1 error" in found.stdout
