"""``tensorpager import``: a trace of a public format."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import click

from ..files import follow_own_links
from ..sizes import format_bytes
from .options import json_option, output_option, page_size_option
from .output import emit_json, emit_text
from .tables import format_us

FORMATS = ("g10", "torch-profiler", "torch-snapshot")


@click.command("import")
@click.argument("form", metavar="|".join(FORMATS), type=click.Choice(FORMATS))
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@output_option("The trace, a Parquet file.")
@page_size_option("2MiB", "Bytes of a page in the trace (default: 2MiB).")
@json_option
def import_trace(form: str, file: Path, output: Path, page_size: int, as_json: bool) -> None:
    """Make a trace of a recording in a public format.

    \b
    g10             a workload of the G10 repository, as JSON (.json, .json.gz)
    torch-profiler  a Chrome trace of torch.profiler, with memory and shapes
    torch-snapshot  a CUDA memory snapshot of torch.cuda.memory

    \b
    Example:
      tensorpager import g10 bert-256.json.gz -o bert-256.parquet
    """
    importer = import_module(f"..importers.{form.replace('-', '_')}", __package__)
    trace = importer.load(file, page_size)
    from ..trace_file import write_trace

    trace = write_trace(follow_own_links(output), trace)
    if as_json:
        emit_json(
            {
                "path": str(output),
                "sha256": trace.sha256,
                "ops": trace.ops,
                "tensors": trace.tensors,
                "ideal_us": trace.ideal_us,
                "tensor_bytes": int(trace.tensor_bytes.sum()),
                "page_size": trace.page_size,
            }
        )
        return
    emit_text(
        f"{output}: {trace.ops} ops in {format_us(trace.ideal_us)}, {trace.tensors} tensors of "
        f"{format_bytes(int(trace.tensor_bytes.sum()))}"
    )
