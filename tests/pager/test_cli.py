import json

from click.testing import CliRunner

import tensorpager
from tensorpager.pager.cli import main


def test_version() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert result.exit_code == 0
    assert tensorpager.__version__ in result.output


def test_doctor_finds_the_machine_usable(tmp_path) -> None:  # type: ignore[no-untyped-def]
    result = CliRunner().invoke(main, ["doctor", "--json", "--disk-path", str(tmp_path)])
    assert result.exit_code == 0, result.output
    findings = {f["what"]: f["state"] for f in json.loads(result.output)}
    assert findings["PyTorch"] == "ok"
    assert findings[f"disk path {tmp_path}"] in ("ok", "warning")
    assert list(tmp_path.iterdir()) == []


def test_doctor_names_a_path_that_will_not_work() -> None:
    result = CliRunner().invoke(main, ["doctor", "--disk-path", "/no/such/folder"])
    assert result.exit_code == 1
    assert "problem" in result.output
    assert "/no/such/folder" in result.output
