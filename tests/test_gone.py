"""What was removed stays away; CHANGELOG.md says what to use instead."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

MODULES = (
    "kernels.cross_entropy",
    "kernels.masked",
    "kernels.row_sums",
    "kernels.softmax_slabs",
    "kernels.zero_copy",
    "pager.devices.first_root",
    "pager.devices.registration",
    "pager.disk.engine_rows",
    "pager.disk.rate_limit",
    "pager.machine.calibration.rows",
    "pager.machine.fio",
    "pager.metrics.format",
    "pager.metrics.outputs",
    "pager.moves.parts",
    "pager.optim.early",
    "pager.optim.load_hooks",
    "pager.optim.overlap",
    "pager.plan.op_clock",
    "pager.plan.recording",
    "pager.plan.sequence_trace",
    "pager.streaming.cross_entropy",
    "pager.streaming.host_rows",
    "pager.tensor.page_lists",
    "planner.commands.show_map",
)

# Names that sources of ours must not have any more, wherever they are.
NAMES = (
    "DeviceClock",
    "HeapLevels",
    "_old_rows",
    "_pcie",
    "_percent_used",
    "fetch_blocks",
    "host_row_bytes",
    "find_iteration",
    "largest_reduction",
    "metrics_path",
    "prints_blocks",
    "seen_at",
    "set_rate_limit",
    "settings_finding",
)


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    file = (ROOT / name.replace(".", "/")).with_suffix(".py")
    assert file.parent.is_dir()
    assert not file.exists()


@pytest.mark.parametrize("path", sorted((ROOT / "pager").rglob("*.py")), ids=lambda p: p.name)
def test_no_import_changes_another_module(path: Path) -> None:
    """``PagedTensor`` and the ``Storage`` classes get their last methods in their own rooms."""
    own = {"tensor/dispatcher.py": "PagedTensor"}
    name = path.relative_to(ROOT / "pager").as_posix()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                while isinstance(target, (ast.Attribute, ast.Subscript)):
                    target = target.value
                    assert not isinstance(target, ast.Name) or target.id in (
                        "_libc", own.get(name),
                    ), f"{name}:{node.lineno}"  # fmt: skip


@pytest.mark.parametrize("path", sorted((ROOT / "pager").rglob("*.py")), ids=lambda p: p.name)
def test_no_object_gets_another_class(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        targets = node.targets if isinstance(node, ast.Assign) else []
        assert not [t for t in targets if isinstance(t, ast.Attribute) and t.attr == "__class__"]


@pytest.mark.parametrize("name", NAMES)
def test_names(name: str) -> None:
    folders = (ROOT / folder for folder in ("pager", "kernels", "planner", "scripts"))
    sources = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(sources) > 100
    assert [str(path) for path in sources if name in path.read_text()] == []
