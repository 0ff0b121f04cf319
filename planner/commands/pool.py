"""``tensorpager pool``: how little memory a trace's tensors need with dense addresses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..files import whole_file
from ..sizes import format_bytes
from .failures import CheckFailed, in_one_line
from .options import TraceCommand, json_option, size
from .output import emit, emit_json, output_path
from .tables import pairs, table

if TYPE_CHECKING:
    from ..packing.buffers import Buffers, Packing


@click.command(cls=TraceCommand)
@click.argument("trace_path", metavar="[TRACE]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--csv",
    "csv_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Read buffers from a CSV file (id,lower,upper,size) instead of a trace.",
)
@click.option("--capacity", type=size, metavar="SIZE", help="The arena that they must fit into.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="How long to search at most.",
)
@click.option(
    "-o",
    "--output",
    "output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    callback=output_path,
    help="Write our offsets as CSV (id,lower,upper,size,offset).",
)
@json_option
@click.pass_context
def pool(
    context: click.Context,
    trace_path: Path | None,
    csv_path: Path | None,
    capacity: int | None,
    seconds: float,
    output: Path | None,
    as_json: bool,
) -> None:
    """Pack lifetimes into one arena.

    Compares our packing with other allocators and with the lower bound, the peak of live bytes.

    \b
    Example:
      tensorpager pool trace.parquet --seconds 5
      tensorpager pool --csv A.csv --capacity 1MiB -o packed.csv

    Exits with 1 if --capacity is given and our packing needs more.
    """
    if (trace_path is None) == (csv_path is None):
        raise click.UsageError("give either a TRACE or --csv FILE.", context)
    with in_one_line(context):
        from ..offsets import compare, write_csv

        buffers = _buffers(trace_path, csv_path)
        packings = compare(buffers, capacity, seconds)
        ours = packings[0]
        if output is not None:
            assert ours.offsets is not None
            with whole_file(output) as part:
                write_csv(part, buffers, ours.offsets)
        if as_json:
            emit_json(_content(buffers, packings))
        else:
            emit(*_tables(buffers, packings, str(trace_path or csv_path)))
        if capacity is not None and ours.footprint_bytes > capacity:
            raise CheckFailed(_too_large(buffers, ours, capacity))


def _buffers(trace_path: Path | None, csv_path: Path | None) -> Buffers:
    from ..offsets import buffers_of, read_csv

    if trace_path is None:
        assert csv_path is not None
        return read_csv(csv_path)
    from ..trace_file import read_trace

    return buffers_of(read_trace(trace_path))


def _content(buffers: Buffers, packings: list[Packing]) -> dict[str, Any]:
    return {
        "peak_live_bytes": buffers.peak_live_bytes,
        "allocators": [
            {
                "name": packing.name,
                "footprint_bytes": packing.footprint_bytes,
                "seconds": round(packing.seconds, 6),
                "optimal": packing.optimal,
            }
            for packing in packings
        ],
    }


def _tables(buffers: Buffers, packings: list[Packing], source: str) -> list[Any]:
    bound = buffers.peak_live_bytes
    rows = [
        (
            packing.name,
            format_bytes(packing.footprint_bytes),
            f"{packing.footprint_bytes / bound:.4f}" if bound else "",
            "yes" if packing.optimal else "",
            f"{packing.seconds:.2f}",
        )
        for packing in packings
    ]
    facts = [
        ("buffers", f"{len(buffers)} from {source}"),
        ("peak of live bytes", f"{format_bytes(bound)} ({bound} bytes): nothing can need less"),
    ]
    return [
        pairs(facts),
        "",
        table(["<allocator", "footprint", "over peak", "optimal", "seconds"], rows),
    ]


def _too_large(buffers: Buffers, ours: Packing, capacity: int) -> str:
    if buffers.peak_live_bytes > capacity:
        return (
            f"{buffers.peak_live_bytes} bytes live at one time, more than --capacity {capacity}; "
            "no packing fits"
        )
    return (
        f"our packing needs {ours.footprint_bytes} bytes, --capacity is {capacity}; allow more "
        "--capacity, or more --seconds"
    )
