"""``tensorpager completion``: the shell completes commands, options and their values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import click

from ..hardware import PRESETS
from .output import emit_text

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

PROGRAM = "tensorpager"
COMPLETE_VARIABLE = "_TENSORPAGER_COMPLETE"  # click looks for it whenever the program starts
PAGE_SIZES = ("64KiB", "128KiB", "256KiB", "512KiB", "1MiB", "2MiB", "4MiB", "8MiB", "16MiB")


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that makes a shell complete.

    It completes commands, options, hardware, policies, page sizes and sweeps.

    \\b
    Install it with one line:
      bash  echo 'eval "$(tensorpager completion bash)"' >> ~/.bashrc
      zsh   echo 'eval "$(tensorpager completion zsh)"' >> ~/.zshrc
      fish  tensorpager completion fish > ~/.config/fish/completions/tensorpager.fish

    \\b
    Example:
      tensorpager completion bash
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    context = click.get_current_context().find_root()
    emit_text(found(context.command, {}, PROGRAM, COMPLETE_VARIABLE).source().rstrip())


def completable(command: click.Command) -> click.Command:
    """The command, the values of whose options the shell can complete too."""
    for parameter in command.params:
        for name in parameter.opts:
            if name in VALUES:
                # Public, and called on the object: no command has to name its completions.
                parameter.shell_complete = partial(_complete, VALUES[name])  # type: ignore[method-assign]
    return command


Values = Callable[[click.Context, str], Iterable[str]]


def _complete(values: Values, context: click.Context, incomplete: str) -> list[CompletionItem[str]]:
    """Those that begin with what is typed; a file where none does."""
    from click.shell_completion import CompletionItem

    found = [value for value in values(context, incomplete) if value.startswith(incomplete)]
    if not found and values is _hardware:
        return [CompletionItem(incomplete, type="file")]
    return [CompletionItem(value) for value in found]


def _hardware(context: click.Context, incomplete: str) -> Iterable[str]:
    return PRESETS


def _policies() -> list[str]:
    from ..registry import ALIASES, POLICIES

    return [*POLICIES, *ALIASES]


def _policy(context: click.Context, incomplete: str) -> Iterable[str]:
    return _policies()


def _policy_list(context: click.Context, incomplete: str) -> Iterable[str]:
    """The last of several between commas; each once."""
    before, comma, _ = incomplete.rpartition(",")
    taken = before.split(",")
    return [f"{before}{comma}{name}" for name in _policies() if name not in taken]


def _sweep(context: click.Context, incomplete: str) -> Iterable[str]:
    """Whole examples, to be edited: a name alone would get a space behind it."""
    from .axes import KINDS

    return [f"{name}={kind.example}" for name, kind in KINDS.items()]


def _page_size(context: click.Context, incomplete: str) -> Iterable[str]:
    return PAGE_SIZES


VALUES: dict[str, Values] = {
    "--hardware": _hardware,
    "--policy": _policy,
    "--policies": _policy_list,
    "--sweep": _sweep,
    "--page-size": _page_size,
}
