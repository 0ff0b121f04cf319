"""Options that several commands share: the trace, the machine and its overrides, JSON."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..errors import HardwareError
from ..hardware import PRESETS, Hardware, load_hardware
from ..sizes import parse_bytes
from .output import output_path

if TYPE_CHECKING:
    from ..trace import Trace

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Share:
    """A part of the trace's peak, 1.0 for all of it."""

    of_peak: float


def size(text: str) -> int:
    """Bytes: ``24GiB``, ``5GB`` or a number."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from error


def limit(text: str) -> float:
    """Bytes, or ``inf`` for no limit."""
    return math.inf if text.strip().lower() == "inf" else size(text)


def limit_or_share(text: str) -> float | Share:
    """Bytes, ``inf``, or a share of the trace's peak: ``50%``."""
    if not text.strip().endswith("%"):
        return limit(text)
    try:
        percent = float(text.strip()[:-1])
    except ValueError:
        percent = math.nan
    if not 0 < percent < math.inf:
        raise click.BadParameter(f"{text!r} is no share of the peak; write for example '50%'.")
    return Share(percent / 100)


def rate(text: str) -> int:
    """Bytes per second: ``25GB`` or ``25GB/s``."""
    return size(text.strip().removesuffix("/s"))


def page(text: str) -> int:
    """Bytes of a page, at least 1."""
    if not (found := size(text)):
        raise click.BadParameter(f"{text!r}: a page has at least 1 byte; usual is '2MiB'.")
    return found


def policy_names(text: str) -> list[str]:
    """Names between commas without repeats, each known, in the order given."""
    from ..registry import ALIASES, POLICIES, find

    chosen = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not chosen:
        known = ", ".join([*POLICIES, *ALIASES])
        raise click.BadOptionUsage("policies", f"--policies names none of {known}.")
    for name in chosen:
        find(name)
    return chosen


class TraceCommand(click.Command):
    """A command whose first argument is a TRACE. ``--example``, anywhere on the line, stands for
    the trace that is in the package."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        *own, help_option = super().get_params(ctx)
        return [*own, _EXAMPLE_OPTION, help_option]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if EXAMPLE in args:
            args = [os.fspath(EXAMPLE_TRACE), *(word for word in args if word != EXAMPLE)]
        return super().parse_args(ctx, args)


EXAMPLE = "--example"
EXAMPLE_TRACE = Path(__file__).with_name("example.parquet")
_EXAMPLE_OPTION = click.Option(
    [EXAMPLE],
    is_flag=True,
    expose_value=False,
    help="Take the sample in the package as TRACE: a language model of 10 million parameters.",
)

trace_argument = click.argument("trace_path", metavar="TRACE", type=click.Path(path_type=Path))
plan_argument = click.argument(
    "plan_path", metavar="[PLAN]", required=False, type=click.Path(path_type=Path)
)
quick_option = click.option("--quick", is_flag=True, help="A shorter search for lp and the bound.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")


def output_option(help_text: str) -> Callable[[F], F]:
    """``-o``, the file that a command writes."""
    return click.option(
        *("-o", "--output"),
        required=True,
        type=click.Path(path_type=Path),
        callback=output_path,
        help=help_text,
    )


def page_size_option(default: str | None, help_text: str) -> Callable[[F], F]:
    return click.option("--page-size", type=page, metavar="SIZE", default=default, help=help_text)


@dataclass(frozen=True)
class Machine:
    """The hardware that was asked for; a share of the peak needs a trace to become bytes."""

    base: Hardware
    share: Share | None
    name: str = ""  # as it was asked for

    def for_trace(self, trace: Trace) -> Hardware:
        """Shares are of the peak in whole pages, so that ``100%`` is room for everything, and are
        rounded down to pages."""
        if self.share is None:
            return self.base
        from ..lifetimes import live_pages

        page_size = self.base.page_size
        peak_pages = int(live_pages(trace, page_size).max(initial=0))
        pages = max(1, math.floor(peak_pages * self.share.of_peak + 1e-9))
        return self.base.with_(device_bytes=pages * page_size)


_OVERRIDE_OPTIONS = [
    click.option(
        *("--device-bytes", "--device-budget"),
        type=limit_or_share,
        metavar="SIZE|%",
        help="Device memory, such as 24GiB, or 50% of the trace's peak in whole pages.",
    ),
    click.option(
        *("--host-bytes", "--host-budget"), type=limit, metavar="SIZE", help="Host memory, or inf."
    ),
    click.option(
        *("--disk-bytes", "--disk-budget"), type=limit, metavar="SIZE", help="Disk space, or inf."
    ),
    click.option(
        "--d2h", "d2h_bytes_per_s", type=rate, metavar="RATE", help="Link, device to host: 25GB."
    ),
    click.option(
        "--h2d", "h2d_bytes_per_s", type=rate, metavar="RATE", help="Link, host to device."
    ),
    click.option(
        "--disk-read", "disk_read_bytes_per_s", type=rate, metavar="RATE", help="Disk to device."
    ),
    click.option(
        "--disk-write", "disk_write_bytes_per_s", type=rate, metavar="RATE", help="Device to disk."
    ),
    click.option(
        "--latency-us", "transfer_latency_us", type=float, metavar="US", help="µs before a move."
    ),
    page_size_option(None, "Bytes of a page (default: the machine's)."),
]


def hardware_options(command: F) -> F:
    """``--hardware`` and its overrides; the command gets them as ``machine``, a Machine."""
    return _with_machine(command, required=True)


def optional_hardware_options(command: F) -> F:
    """The same options for a command that can do without a machine: without ``--hardware`` it gets
    that of its plan, if that says for which it was made, or ``machine=None``. Overrides of a
    machine that is not named are refused."""
    return _with_machine(command, required=False)


def _with_machine(command: F, *, required: bool) -> F:
    @wraps(command)
    def with_machine(hardware: str | None, device_bytes: Any, **values: Any) -> Any:
        overrides = {name: values.pop(name) for name in _OVERRIDES}
        base = _remembered(values.get("plan_path")) if hardware is None else None
        if hardware is None and base is None:
            if any(value is not None for value in (device_bytes, *overrides.values())):
                raise click.UsageError(
                    "--device-bytes, --d2h and the like change a machine; name it with --hardware."
                )
            return command(machine=None, **values)
        share = device_bytes if isinstance(device_bytes, Share) else None
        overrides["device_bytes"] = None if share else device_bytes
        named = hardware or f"of {values['plan_path']}"
        machine = Machine(_apply(base or load_hardware(named), named, overrides), share, named)
        return command(machine=machine, **values)

    wrapped: Any = with_machine
    for option in reversed(_OVERRIDE_OPTIONS):
        wrapped = option(wrapped)
    of_plan = "" if required else " of the plan"
    help_text = f"The machine{of_plan}: {', '.join(PRESETS)}, or a TOML file."
    named = click.option("--hardware", required=required, metavar="NAME|FILE", help=help_text)
    return named(wrapped)  # type: ignore[no-any-return]


_OVERRIDES = (
    "host_bytes",
    "disk_bytes",
    "d2h_bytes_per_s",
    "h2d_bytes_per_s",
    "disk_read_bytes_per_s",
    "disk_write_bytes_per_s",
    "transfer_latency_us",
    "page_size",
)


def _remembered(plan_path: Path | None) -> Hardware | None:
    """The hardware that the plan was made for, if it says so."""
    if plan_path is None:
        return None
    from ..plan import read_plan

    return read_plan(plan_path).hardware


def _apply(base: Hardware, name: str, overrides: dict[str, Any]) -> Hardware:
    try:
        return base.with_(**overrides)
    except HardwareError as error:
        raise HardwareError(f"--hardware {name} with overrides: {error}") from error
