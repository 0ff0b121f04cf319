#!/usr/bin/env python3
"""Write the reference in docs/ from the help of the commands and the docstrings of the package.

make_reference.py            # writes docs/commands.md and docs/python.md
make_reference.py --check    # says which of them are not current, and exits with 1
"""

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import click

import tensorpager
from tensorpager.pager.cli import COMMANDS, main
from tensorpager.planner.hardware import PRESETS, describe

DOCS = Path(__file__).parents[1] / "docs"
WIDTH = 110
MADE = "<!-- Made by scripts/make_reference.py from the sources; do not edit. -->\n"


# -- commands ------------------------------------------------------------------------------------
def commands() -> str:
    context = click.Context(main, info_name="tensorpager")
    parts = [
        MADE,
        "# Commands\n",
        "The examples run on `trace.parquet`, which `tensorpager record` writes, and on\n"
        "`plan.json`, which `tensorpager plan` writes. For the sample in the package write\n"
        "`--example` instead of `trace.parquet`.\n",
        "<!-- setup: cp EXAMPLE trace.parquet\n"
        "tensorpager plan --example --hardware cpu --page-size 256KiB --quick -o plan.json -->",
        _machines(),
    ]
    for name in COMMANDS:
        command = main.get_command(context, name)
        assert command is not None
        parts.append(_command(command, click.Context(command, info_name=name, parent=context)))
    return "\n".join(parts).rstrip() + "\n"


def _machines() -> str:
    rows = "\n".join(f"| `{name}` | {describe(machine)} |" for name, machine in PRESETS.items())
    return f"Machines by name, for `--hardware`:\n\n| name | machine |\n|---|---|\n{rows}\n"


def _command(command: click.Command, context: click.Context) -> str:
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    rows = [
        record
        for parameter in command.get_params(context)
        if (record := parameter.get_help_record(context)) is not None
        and "--help" not in parameter.opts
    ]
    options = "\n".join(f"| `{_cell(names)}` | {_cell(text)} |" for names, text in rows)
    table = f"| option | |\n|---|---|\n{options}\n" if rows else ""
    text = "\n".join(_paragraphs(inspect.cleandoc(command.help or "")))
    return f"## {context.command_path}\n\n    {usage}\n\n{text}\n{table}"


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        lines = paragraph.splitlines()
        as_it_is = lines[0] == "\b"
        if as_it_is and lines[1] == "Example:":
            joined = re.sub(r" \\\n\s*", " ", textwrap.dedent("\n".join(lines[2:])))
            yield from _examples(joined.splitlines())
        elif as_it_is:
            yield "```text\n" + "\n".join(lines[1:]) + "\n```\n"
        else:
            yield "\n".join(textwrap.wrap(" ".join(lines), WIDTH)) + "\n"


def _examples(lines: list[str]) -> Iterator[str]:
    """Blocks of lines that run, and of others, with a note for the test that runs them."""
    for note, group in groupby(lines, key=_note):
        yield f"{note}```sh\n" + "\n".join(group) + "\n```\n"


def _note(line: str) -> str:
    for word, reason in NOT_RUN.items():
        if word in line:
            return f"<!-- not run: {reason} -->\n"
    return "<!-- slow: it plans -->\n" if any(word in line for word in SLOW) else ""


NOT_RUN = {
    "/nvme": "names a drive of yours",
    "train.py": "runs a script of yours",
    "tensorpager estimate": "describes a model of yours",
    "tensorpager top": "looks at a training of yours",
    " import ": "reads a recording of yours",
    "A.csv": "reads a file of yours",
    "old.": "reads files of yours",
}
SLOW = (" plan ", " compare ", " pool ", " html ", "--sweep", "--target")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# -- Python --------------------------------------------------------------------------------------
def python() -> str:
    names = [name for name in tensorpager.__all__ if not name.startswith("__")]
    things = {name: getattr(tensorpager, name) for name in names}
    for module in [name for name, thing in things.items() if inspect.ismodule(thing)]:
        inside = things.pop(module)
        things |= {f"{module}.{name}": getattr(inside, name) for name in inside.__all__}
    kinds = sorted(things.items(), key=lambda item: (item[0] != "Pager", _is_error(item[1])))
    parts = [
        MADE,
        "# Python\n",
        "    import tensorpager as tp\n",
        *(_thing(name, thing) for name, thing in kinds),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _is_error(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, Exception)


def _thing(name: str, thing: Any) -> str:
    heading = f"## tp.{name}\n"
    if _is_error(thing):
        return f"{heading}\n{_text(thing)}"
    signature = f"    tp.{name}{_signature(thing)}\n"
    if not isinstance(thing, type):
        return f"{heading}\n{signature}\n{_text(thing)}"
    members = [
        f"### {name}.{member}{'' if isinstance(value, property) else '()'}\n\n"
        + (
            ""
            if isinstance(value, property)
            else f"    {member}{_signature(getattr(thing, member))}\n\n"
        )
        + _text(value)
        for member, value in vars(thing).items()
        if not member.startswith("_") and _is_member(value) and value.__doc__
    ]
    shown = signature if name == "Pager" else ""
    return "\n".join([heading, *([shown] if shown else []), _text(thing), *members])


def _is_member(value: Any) -> bool:
    return inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod)


def _signature(thing: Any) -> str:
    """One argument on a line where all of them do not fit on one."""
    signature = inspect.signature(thing)
    arguments = list(_arguments_of(signature))
    returned = signature.return_annotation
    end = "" if returned in (signature.empty, "None") else f" -> {returned}"
    whole = f"({', '.join(arguments)}){end}"
    if len(whole) <= WIDTH - 30:
        return whole
    return "".join(["(", *(f"\n        {one}," for one in arguments), "\n    )", end])


def _arguments_of(signature: inspect.Signature) -> Iterator[str]:
    """As they are written, without ``self``. Annotations are texts: nothing evaluates them."""
    star = False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        star |= parameter.kind is parameter.VAR_POSITIONAL
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            star = True
            yield "*"
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        typed = "" if parameter.annotation is parameter.empty else f": {parameter.annotation}"
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        yield f"{prefix.get(parameter.kind, '')}{parameter.name}{typed}{default}"


def _text(thing: Any) -> str:
    """A docstring as Markdown: its roles as code, its arguments as a list, the rest as it is."""
    text = inspect.getdoc(thing) or ""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`").replace(" ::\n", "\n")
    head, found, tail = text.partition("Args:\n")
    if not found:
        return text + "\n"
    body, _, rest = tail.partition("\n\n")
    body = re.sub(r"^    (\w[\w, ]*): ", r"- `\1`: ", body, flags=re.MULTILINE)
    return f"{head}Arguments:\n\n{body.replace('        ', '  ')}\n\n{rest}\n"


PAGES = {"commands.md": commands, "python.md": python}


def run(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(inspect.cleandoc(__doc__ or ""), file=sys.stderr)
        return 2
    stale = []
    for name, make in PAGES.items():
        path, text = DOCS / name, make()
        if path.exists() and path.read_text() == text:
            continue
        stale.append(name)
        if not arguments:
            path.write_text(text)
    if arguments and stale:
        print(f"docs/{', docs/'.join(stale)}: not current; run scripts/make_reference.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
