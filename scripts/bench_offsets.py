"""How small each allocator packs lifetimes, and how long that takes.

Files are minimalloc's CSV instances, whose capacity stands in the name (A.1048576.csv), G10
workloads (.json, .json.gz), CUDA memory snapshots (.pickle) and trace files (.parquet). For each,
prints the footprint over the peak of live bytes, which nothing can go below. Every packing is
checked. Exits with 1 if one does not hold or ours needs more than an instance's capacity.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from tensorpager.planner.offsets import Buffers, Packing, buffers_of, check, compare, read_csv


@dataclass(frozen=True)
class Result:
    name: str
    capacity: int | None
    buffers: Buffers
    packings: list[Packing]

    @property
    def ours(self) -> Packing:
        return self.packings[0]

    @property
    def fits(self) -> bool:
        return self.capacity is None or self.ours.footprint_bytes <= self.capacity


def load(path: Path) -> tuple[Buffers, int | None]:
    """The buffers of a file, and the capacity that its name gives, if it does."""
    if path.suffix == ".csv":
        given = path.suffixes[0][1:] if len(path.suffixes) > 1 else ""
        return read_csv(path), int(given) if given.isdigit() else None
    if path.suffix == ".pickle":
        from tensorpager.planner.importers.torch_snapshot import load as read
    elif path.suffix == ".parquet":
        from tensorpager.planner.trace_file import read_trace as read
    else:
        from tensorpager.planner.importers.g10 import load as read
    return buffers_of(read(path)), None


def measure(path: Path, seconds: float) -> Result:
    buffers, capacity = load(path)
    packings = compare(buffers, capacity, seconds)
    for packing in packings:
        if packing.offsets is not None:
            faults = check(buffers, packing.offsets, packing.footprint_bytes)
            if faults:
                sys.exit(f"{path}: {packing.name}: {faults[0]}")
    return Result(path.name.split(".")[0], capacity, buffers, packings)


def row(result: Result) -> list[str]:
    """Name, buffers, ours with its time, the others; * for a footprint that is proven smallest."""
    peak = result.buffers.peak_live_bytes
    cells = [result.name, str(len(result.buffers))]
    if result.capacity is None:
        cells.append("")
    else:
        cells.append("yes" if result.fits else "no")
    for packing in result.packings:
        star = "*" if packing.optimal else ""
        cells.append(f"{packing.footprint_bytes / peak:.4f}{star}")
        if packing is result.ours:
            cells.append(f"{packing.seconds:.2f}")
    return cells


def as_json(result: Result) -> dict[str, object]:
    return {
        "name": result.name,
        "buffers": len(result.buffers),
        "capacity_bytes": result.capacity,
        "fits": result.fits,
        "peak_live_bytes": result.buffers.peak_live_bytes,
        "allocators": [
            {
                "name": packing.name,
                "footprint_bytes": packing.footprint_bytes,
                "optimal": packing.optimal,
                "seconds": round(packing.seconds, 4),
            }
            for packing in result.packings
        ],
    }


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--seconds", default=60.0, show_default=True, help="Longest search for each file.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write results here.")
def main(files: tuple[Path, ...], seconds: float, json_path: Path | None) -> None:
    """Pack the lifetimes in FILES with every allocator."""
    results = []
    for path in files:
        results.append(measure(path, seconds))
        click.echo(f"{results[-1].name}: {results[-1].ours.seconds:.2f} s", err=True)
    table = Table("", "buffers", "fits", title="footprint / peak of live bytes")
    for packing in results[0].packings:
        table.add_column(packing.name, justify="right")
        if packing is results[0].ours:
            table.add_column("s", justify="right")
    for result in results:
        table.add_row(*row(result))
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(table)
    if json_path is not None:
        json_path.write_text(json.dumps([as_json(result) for result in results], indent=1) + "\n")
    if not all(result.fits for result in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
