import json
import re
import shutil

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
    for what in ("link", "disk, one way at a time", "disk, both at once"):
        assert findings[what] == "ok"
    assert list(tmp_path.iterdir()) == []


def test_doctor_prints_rates(tmp_path) -> None:  # type: ignore[no-untyped-def]
    result = CliRunner().invoke(main, ["doctor", "--disk-path", str(tmp_path)])
    rate = r"[0-9]+\.[0-9]{2} [GM]B/s"
    for line in (
        rf"ok +link: {rate} out, {rate} in, [0-9]+\.[0-9] µs per transfer",
        rf"ok +disk, one way at a time: {rate} write, {rate} read",
        rf"ok +disk, both at once: {rate} write, {rate} read",
    ):
        assert re.search(rf"^{line}$", result.output, re.MULTILINE), result.output


def test_doctor_on_a_disk_with_hardly_any_room(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=5 << 20))
    result = CliRunner().invoke(main, ["doctor", "--disk-path", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "warning  disk rates: not measured: less than 8.00 MiB is free" in result.output
    assert "ok       link: " in result.output


def test_doctor_names_a_path_that_will_not_work() -> None:
    result = CliRunner().invoke(main, ["doctor", "--disk-path", "/no/such/folder"])
    assert result.exit_code == 1
    assert "problem" in result.output
    assert "/no/such/folder" in result.output
    assert "ok       link: " in result.output
    assert "GB/s write" not in result.output
