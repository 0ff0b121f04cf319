"""What was removed stays away; CHANGELOG.md says what to use instead."""

from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

MODULES = (
    "kernels.zero_copy",
    "pager.devices.first_root",
    "pager.disk.engine_rows",
    "pager.disk.rate_limit",
    "pager.machine.calibration.rows",
    "pager.machine.fio",
    "pager.metrics.format",
    "pager.metrics.outputs",
    "pager.streaming.host_rows",
    "pager.tensor.page_lists",
)

# Names that sources of ours must not have any more, wherever they are.
NAMES = (
    "HeapLevels",
    "_old_rows",
    "fetch_blocks",
    "host_row_bytes",
    "metrics_path",
    "seen_at",
    "set_rate_limit",
)


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    room = name.rpartition(".")[0]
    assert find_spec(f"tensorpager.{room}") is not None or room == "kernels"
    assert not (ROOT / name.replace(".", "/")).with_suffix(".py").exists()


@pytest.mark.parametrize("name", NAMES)
def test_names(name: str) -> None:
    folders = (ROOT / folder for folder in ("pager", "kernels", "scripts"))
    sources = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(sources) > 100
    assert [str(path) for path in sources if name in path.read_text()] == []
