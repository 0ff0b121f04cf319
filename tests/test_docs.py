"""What README.md and docs/ say can be typed: every shell line and Python block of a page runs, in a
fresh folder, and the reference is what the sources say.

A page's Python blocks are one program, which runs before its shell lines. HTML comments before a
block say what readers need not: ``<!-- not run: why -->``, ``<!-- slow: why -->`` (in full runs
only); ``<!-- setup: … -->`` holds shell lines that run before all others. A Python block that
begins with a comment that is a file's name is that file.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from tensorpager.pager.cli import main
from tensorpager.planner.commands.options import EXAMPLE_TRACE

from . import programs

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(
    r"((?:<!-- (?:not run|slow): .*? -->\n)?)```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE
)
SETUP = re.compile(r"<!-- setup: (.*?) -->", re.DOTALL)
LANGUAGES = {"sh", "python", "text"}


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    note: str  # "", "slow" or "not run"


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = [Block("sh", setup, "") for setup in SETUP.findall(text)]
    for note, language, code in BLOCK.findall(text):
        found.append(Block(language, code, note[5:].partition(":")[0]))
    return found


# Lines that simulate another machine than a trace's or a plan's are warned of that.
ANOTHER_MACHINE = re.compile(
    "warning: (durations are as recorded on|.* was made for another machine)"
)


def shell_lines(code: str) -> list[str]:
    joined = code.replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


def run_line(line: str) -> None:
    """In this process where it is ours, as each start of Python takes its time."""
    words = shlex.split(line, comments=True)
    if words[0] == "cp":
        source = EXAMPLE_TRACE if words[1] == "EXAMPLE" else Path(words[1])
        shutil.copyfile(source, words[2])
    elif words[0] == "tensorpager" and not {"|", ">", "&"} & set(words):
        result = CliRunner().invoke(main, words[1:])
        assert result.exit_code == 0, (line, result.stderr or result.exception)
        said = [one for one in result.stderr.splitlines() if not ANOTHER_MACHINE.search(one)]
        assert not said, line
    else:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (line, done.stdout[-500:], done.stderr[-1000:])


def run_page(page: Path, notes: set[str]) -> None:
    chosen = [block for block in blocks(page) if block.note in notes]
    Path("scripts").symlink_to(ROOT / "scripts")
    program = []
    for block in chosen:
        if block.language != "python":
            continue
        name = re.match(r"# (\w+\.py)\n", block.text)
        if name:
            Path(name[1]).write_text(block.text)
        else:
            program.append(block.text)
    if program:
        ended = programs.run("-c", "\n".join(program), env=os.environ | {"PYTHONPATH": str(ROOT)})
        assert ended.returncode == 0, ended.stderr
        assert "Warning" not in ended.stderr, ended.stderr
    for block in chosen:
        if block.language == "sh":
            for line in shell_lines(block.text):
                run_line(line)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_says_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not {block.language for block in blocks(page) if block.note == ""} & {"sh", "python"}:
        pytest.skip("nothing on this page runs quickly")
    monkeypatch.chdir(tmp_path)
    run_page(page, {""})


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_takes_long_runs_too(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "slow" not in {block.note for block in blocks(page)}:
        pytest.skip("nothing on this page takes long")
    monkeypatch.chdir(tmp_path)
    run_page(page, {"", "slow"})


def test_every_block_has_a_language_and_every_link_leads_somewhere() -> None:
    for page in PAGES:
        text = page.read_text()
        fences = re.findall(r"^```(\w*)$", text, re.MULTILINE)
        assert set(fences[::2]) <= LANGUAGES, page
        assert set(fences[1::2]) <= {""}, page
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
            assert "://" in link or (page.parent / link).exists(), (page.name, link)


def test_the_readme_is_short() -> None:
    words = re.sub(r"```.*?```", "", (ROOT / "README.md").read_text(), flags=re.DOTALL).split()
    assert len(words) <= 700


def test_the_reference_is_current() -> None:
    ended = programs.run(str(ROOT / "scripts" / "make_reference.py"), "--check")
    assert ended.returncode == 0, ended.stdout + ended.stderr
