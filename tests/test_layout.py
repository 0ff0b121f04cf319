"""Who may import whom, by reading the sources."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("pager", "kernels", "planner")


def imports(path: Path) -> set[str]:
    """Top-level names and our folders that the file at ``path`` imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".")
            if node.level == 0:
                found.add(module[0])
            elif node.level == 2:
                found.add(f"tensorpager.{module[0]}")
    return found


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", sources("planner"), ids=lambda p: p.name)
def test_planner_knows_no_torch(path: Path) -> None:
    used = imports(path)
    assert not used & {"torch", "triton", "tensorpager.pager", "tensorpager.kernels"}


@pytest.mark.parametrize("path", sources("kernels"), ids=lambda p: p.name)
def test_kernels_know_neither_pager_nor_planner(path: Path) -> None:
    assert not imports(path) & {"tensorpager.pager", "tensorpager.planner", "tensorpager"}


def test_kernels_is_no_package_at_the_root() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("folder", FOLDERS)
def test_links_are_relative(folder: str) -> None:
    link = ROOT / "tensorpager" / folder
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{folder}"


def test_tests_that_the_readme_names_exist() -> None:
    """The table of guarantees in tests/README.md."""
    folder = ROOT / "tests"
    named = re.findall(r"`([\w/]*test_\w+\.py)(?:::(\w+))?`", (folder / "README.md").read_text())
    assert len(named) > 50
    for path, test in named:
        assert (folder / path).exists(), path
        assert not test or f"def {test}(" in (folder / path).read_text(), f"{path}::{test}"


ASKS_FOR_CUDA = re.compile(r"""\.is_cuda\b|["']cuda["']\s*(==|!=)|(==|!=)\s*["']cuda["']""")
MAY_ASK = {
    "kernels/launch.py": "def runs_triton",  # whether compiled kernels run there
    "pager/memory/untyped.py": "def is_cuda",  # PyTorch's own attribute
}


@pytest.mark.parametrize("path", sources("pager") + sources("kernels"), ids=lambda p: p.name)
def test_only_devices_know_that_one_is_cuda(path: Path) -> None:
    """Others ask what a device can do."""
    name = path.relative_to(ROOT).as_posix()
    if name.startswith("pager/devices/"):
        return
    found = len(ASKS_FOR_CUDA.findall(path.read_text()))
    assert found == (name in MAY_ASK)
    assert MAY_ASK.get(name, "") in path.read_text()


# From the bottom up: a room imports from those before it, types included.
ROOMS = (
    "errors", "devices", "memory", "disk", "machine", "moves", "budget", "core", "debug", "tensor",
    "streaming", "optim", "plan", "checkpoint", "distributed", "metrics", "profile_run",
    "iteration", "inference", "api", "integrations", "cli",
)  # fmt: skip


# The same of the planner.
PLANNER_ROOMS = (
    "errors", "files", "sizes", "shown", "hardware", "trace", "plan", "simulation", "lifetimes",
    "buckets", "ranks", "iteration", "trace_check", "trace_file", "request", "simulator",
    "validator", "repeats", "shorter", "policies", "lp", "joint",
    "registry", "places", "timeline", "tier_usage", "sweep", "target", "outlook", "background",
    "packing", "offsets", "importers", "difference", "perfetto", "report", "commands",
)  # fmt: skip


def room_imports(top: str) -> set[tuple[str, str]]:
    """(importing file, imported file) between rooms, as paths below ``top`` without ``.py``."""
    folder = ROOT / top
    files = {p.relative_to(folder).with_suffix("").as_posix() for p in sources(top)}
    found = set()
    for name in files:
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text())):
            if not isinstance(node, ast.ImportFrom) or not 0 < node.level <= name.count("/") + 1:
                continue
            start = name.split("/")[: -node.level]
            target = "/".join([*start, *(node.module or "").split(".")]).strip("/")
            modules = [target, *(f"{target}/{alias.name}".strip("/") for alias in node.names)]
            modules += [f"{module}/__init__" for module in modules]
            found |= {(name, module) for module in modules if module in files}
    return {(a, b) for a, b in found if a.split("/")[0] != b.split("/")[0] != "__init__"}


@pytest.mark.parametrize(("top", "rooms"), [("pager", ROOMS), ("planner", PLANNER_ROOMS)])
def test_rooms_import_downwards(top: str, rooms: tuple[str, ...]) -> None:
    place = {room: i for i, room in enumerate(rooms)}
    pairs = {(a.split("/")[0], b.split("/")[0]): f"{a} > {b}" for a, b in room_imports(top)}
    assert {name for pair in pairs for name in pair} <= place.keys()
    assert not [text for (a, b), text in pairs.items() if place[a] < place[b]]


NAMES_PAGER = ("api", "integrations", "cli")


@pytest.mark.parametrize("path", sources("pager"), ids=lambda p: p.name)
def test_only_the_top_names_pager(path: Path) -> None:
    """Rooms take a ``Core``, or less."""
    if path.relative_to(ROOT / "pager").with_suffix("").parts[0] in NAMES_PAGER:
        return
    tree = ast.parse(path.read_text())
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    named |= {a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
    assert "Pager" not in named


def test_every_folder_of_ours_is_in_the_wheel() -> None:
    named = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    )
    there = {
        ".".join(["tensorpager", *path.parent.relative_to(ROOT).parts])
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
    }
    assert named == there | {"tensorpager"}, "name it in pyproject.toml"


def test_every_file_that_is_no_module_is_in_the_wheel() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            where = path.relative_to(ROOT)
            if (
                path.is_dir()
                or path.suffix in (".py", ".pyc", ".md")
                or "__pycache__" in where.parts
            ):
                continue
            owners = [
                (parent, data[name])
                for parent in where.parents
                if (name := ".".join(["tensorpager", *parent.parts])) in data
            ]
            assert any(
                where.relative_to(parent).match(pattern)
                for parent, patterns in owners
                for pattern in patterns
            ), where
