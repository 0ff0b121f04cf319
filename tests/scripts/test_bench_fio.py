"""Our disk tier beside fio: fio's failures are said, and the file is ours again afterwards."""

import shutil
from pathlib import Path

import bench_fio
import click
import pytest

from tensorpager.pager.machine.bench import BenchFile, Setting

SETTING = Setting("posix", False, 1 << 20, 2)


def test_fio_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "fio"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'fio: no such engine' >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    with (
        BenchFile(tmp_path, 16 << 20) as file,
        pytest.raises(click.ClickException, match="fio ended with 3: fio: no such engine"),
    ):
        bench_fio.compare(file, SETTING, rounds=1, seconds=0.1)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_fio(tmp_path: Path) -> None:
    with BenchFile(tmp_path, 32 << 20) as file:
        shares = bench_fio.compare(file, SETTING, rounds=1, seconds=0.1)
        assert all(rate > 0 for by in shares.values() for rate in by.values())
        with file.engine(SETTING) as engine:
            file.measure(engine, SETTING, 0.1)  # what fio wrote is gone
