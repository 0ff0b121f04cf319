"""Shell completion: bash itself is asked; zsh and fish through what their scripts call."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tensorpager.planner.hardware import PRESETS

from .command_line import refused, run

PROGRAM = f"#!{sys.executable}\nfrom tensorpager.pager.cli import main\nmain()\n"
ASK = """
eval "$(tensorpager completion bash)"
while IFS= read -r line; do
  read -ra COMP_WORDS <<< "$line"
  [[ $line == *" " ]] && COMP_WORDS+=("")
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
  _tensorpager_completion tensorpager
  echo "${COMPREPLY[*]}"
done
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """``tensorpager`` on the path, as an installed script."""
    program = tmp_path / "bin" / "tensorpager"
    program.parent.mkdir()
    program.write_text(PROGRAM)
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes(environment: dict[str, str]) -> None:
    lines = {
        "tensorpager sim": ["simulate"],
        "tensorpager simulate --targ": ["--target"],
        "tensorpager plan t --hardware ": list(PRESETS),
        "tensorpager plan t --policy appo": ["appobmem"],
        "tensorpager compare t --policies lp,lr": ["lp,lru"],
    }
    result = subprocess.run(
        ["bash", "--norc", "-c", ASK],
        input="".join(f"{line}\n" for line in lines),
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.stderr == ""
    assert [line.split() for line in result.stdout.splitlines()] == list(lines.values())


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_what_other_shells_ask(shell: str, environment: dict[str, str]) -> None:
    word = "tensorpager simulate t --sweep lin"
    result = subprocess.run(
        ["tensorpager"],
        env={
            **environment,
            "_TENSORPAGER_COMPLETE": f"{shell}_complete",
            "COMP_WORDS": word,
            "COMP_CWORD": "4" if shell == "zsh" else "lin",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.stderr == ""
    assert "link=8GB:64GB:8" in result.stdout
    assert "device" not in result.stdout
    script = run("completion", shell).stdout
    assert f"_TENSORPAGER_COMPLETE={shell}_complete" in script


def test_other_shells_are_refused() -> None:
    assert "'tcsh'" in refused("completion", "tcsh")
