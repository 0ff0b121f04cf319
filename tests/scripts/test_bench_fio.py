"""Our disk tier beside fio: fio's failures are said."""

import shutil
from pathlib import Path

import bench_fio
import click
import pytest

from tensorpager.pager.machine.bench import Setting

SETTING = Setting("posix", 1 << 20, 2)


def test_fio_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "fio"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'fio: no such engine' >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    with pytest.raises(click.ClickException, match="fio ended with 3: fio: no such engine"):
        bench_fio.compare(tmp_path, 16 << 20, SETTING, rounds=1, seconds=0.1)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_fio(tmp_path: Path) -> None:
    shares = bench_fio.compare(tmp_path, 32 << 20, SETTING, rounds=2, seconds=0.1)
    assert all(rate > 0 for by in shares.values() for rate in by.values())
