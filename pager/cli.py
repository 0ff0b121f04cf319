"""The ``tensorpager`` command: subcommands by name, each loaded when it is used."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from ..planner.commands import failures
from ..planner.commands.output import output_path

# Name on the command line → where the click command is, relative to this package.
COMMANDS = {
    "doctor": ".machine.doctor.command:doctor",
    "bench-io": ".machine.bench_command:bench_io",
    "record": ".plan.record_command:record",
    "estimate": ".plan.estimate_command:estimate",
    "top": ".metrics.top_command:top",
    "import": "..planner.commands.import_trace:import_trace",
    "show": "..planner.commands.show:show",
    "plan": "..planner.commands.plan:plan",
    "simulate": "..planner.commands.simulate:simulate",
    "compare": "..planner.commands.compare:compare",
    "pool": "..planner.commands.pool:pool",
    "diff": "..planner.commands.diff:diff",
    "html": "..planner.commands.html:html",
    "perfetto": "..planner.commands.perfetto:perfetto",
}


class LazyGroup(click.Group):
    """A group that imports a subcommand only when it is run or listed. Whatever goes wrong with
    the input ends in one line on stderr and an exit code, never in a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(import_module(module, __package__), attribute)
        return command

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with failures.closed_pipe_ends_quietly():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with failures.closed_pipe_ends_quietly(), failures.in_one_line(ctx):
            return super().invoke(ctx)

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        run = partial(super().main, *args, standalone_mode=False, **extra)
        return failures.run_and_exit(run) if standalone_mode else run()


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
)
@click.version_option(package_name="tensorpager")
@click.option(
    "--svg",
    type=click.Path(path_type=Path),
    callback=output_path,
    help="Write the tables and charts that a command prints as a picture too.",
)
@click.pass_context
def main(context: click.Context, svg: Path | None) -> None:
    """Train PyTorch models that do not fit, inside a byte-hard memory budget.

    \b
    Example:
      tensorpager show trace.parquet
      tensorpager --svg show.svg show trace.parquet
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
