"""The command itself, and the pieces that subcommands share."""

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tensorpager.pager.cli import COMMANDS, main
from tensorpager.planner.commands import options, output, tables

from .command_line import refused, run


def in_new_process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, which then prints what it had to load."""
    program = (
        "import sys\n"
        "from tensorpager.pager.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: code = end.code\n"
        "heavy = {'torch', 'triton', 'highspy', 'pyarrow', 'numpy'} & set(sys.modules)\n"
        "print('loaded', *sorted(heavy), file=sys.stderr)\n"
        "sys.exit(code)"
    )
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, timeout=300, **{"text": True, **options})


def test_show_works_without_torch(trace_path: Path) -> None:
    result = in_new_process("show", trace_path, capture_output=True)
    assert result.returncode == 0
    assert result.stderr.split() == ["loaded", "numpy", "pyarrow"]


def test_help_loads_nothing_heavy() -> None:
    result = in_new_process("--help", capture_output=True)
    assert result.returncode == 0
    assert result.stderr.split() == ["loaded"]
    assert all(f"\n  {name} " in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert f"tensorpager {name} " in result.stdout.partition("Example:")[2]
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("tensorpager sim", "plain,simulate"),
        ("tensorpager simulate --targ", "plain,--target"),
        ("tensorpager show --by m", "plain,module"),
    ],
)
def test_shells_complete(line: str, completed: str) -> None:
    """As docs/plans.md sets it up: click asks the program for what the line goes on with."""
    words = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    asked = {"_TENSORPAGER_COMPLETE": "bash_complete", **words}
    result = CliRunner().invoke(main, [], prog_name="tensorpager", env=asked)
    assert result.output.splitlines() == [completed]


def test_no_command_is_a_question_for_help() -> None:
    result = run()
    assert result.exit_code == 0
    assert "Commands:" in result.stdout


def test_a_closed_pipe_is_no_error(trace_path: Path) -> None:
    for arguments in (["show", trace_path], ["show", trace_path, "--json"], ["--help"]):
        reader, writer = os.pipe()
        os.close(reader)
        result = in_new_process(*arguments, stdout=writer, stderr=subprocess.PIPE)
        os.close(writer)
        assert result.returncode == 0
        assert result.stderr.count("\n") == 1  # what this test prints itself
        assert result.stderr.startswith("loaded")


def test_a_terminal_without_box_drawing_gets_its_table(trace_path: Path) -> None:
    result = in_new_process(
        "show",
        trace_path,
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        encoding="latin-1",
    )
    assert result.returncode == 0
    assert "30 µs if nothing waits" in result.stdout
    assert "?????" in result.stdout


def test_whole_file_leaves_the_old_one_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), output.whole_file(path) as part:
        part.write_text(f"half {1 / 0}")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_whole_file_follows_links_and_writes_into_devices(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    link.symlink_to(real)
    with output.whole_file(link) as part:
        part.write_text("new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    with output.whole_file(Path(os.devnull)) as part:
        part.write_text("gone")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_progress_is_for_terminals_only(capsys: pytest.CaptureFixture[str]) -> None:
    with output.progress_bar() as report:
        assert report is None
    with output.progress_bar(terminal=True) as report:
        assert report is not None
        report("solving", 0.5)
    assert "solving" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("us", "text"),
    [(0, "0 µs"), (17.25, "17.2 µs"), (999.9, "1 ms"), (4200, "4.2 ms"), (7.285e6, "7.29 s")],
)
def test_times_for_people(us: float, text: str) -> None:
    assert tables.format_us(us) == text
    assert tables.format_us(1234e6) == "1234 s"


def test_short_keeps_both_ends() -> None:
    assert tables.short("model.layers.0.attention.weight", 20) == "model.l…ntion.weight"
    assert len(tables.short("x" * 99, 20)) == 20
    assert tables.short("a\x1bb\n") == "a?b?"


def test_sizes_on_the_command_line() -> None:
    assert options.limit(" INF ") == float("inf")
    assert options.limit_or_share("12.5%") == options.Share(0.125)
    assert options.limit_or_share("1GiB") == 1 << 30
    assert options.rate("25GB/s") == options.rate("25GB") == 25 * 10**9


def test_what_is_printed_becomes_a_picture_too(trace_path: Path, tmp_path: Path) -> None:
    picture = tmp_path / "show.svg"
    printed = run("show", trace_path).stdout
    result = run("--svg", picture, "show", trace_path)
    assert result.exit_code == 0
    assert result.stdout == printed
    text = picture.read_text()
    assert text.startswith("<svg")
    assert "working" in text
    assert "url(" not in text.replace("url(#", "")  # nothing from the net
    assert "no folder" in refused("--svg", tmp_path / "none" / "x.svg", "show", trace_path)


NO_TORCH = """
import sys

class No:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name=name)

sys.meta_path.insert(0, No())
from tensorpager.pager.cli import main
main(prog_name="tensorpager")
"""


def test_without_pytorch_commands_say_so(tmp_path: Path) -> None:
    for words in (["bench-io", "."], ["estimate", "x.py:f", "--hardware", "cpu", "--batch", "1"]):
        command = [sys.executable, "-c", NO_TORCH, *words]
        ended = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        assert ended.returncode == 2
        assert ended.stderr == f"tensorpager {words[0]}: this needs PyTorch: pip install torch\n"
