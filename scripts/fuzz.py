"""Fuzzes the parsers of foreign files with atheris (libFuzzer), in one process, for some minutes.

Half of the inputs are libFuzzer's, guided by which lines of tensorpager they reach, half are files
that are nearly right (``fuzz_targets.py``, ``fuzz_checkpoints.py``). An input that is neither read
nor refused in one short line is a finding, and so is one that takes longer than 10 s or more than
4 GiB; the run goes on after those that only raise. Exits with 1 if there was any. atheris is no
dependency of tensorpager: pip install atheris comes first.

Example: scripts/fuzz.py --minutes 10
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import click

SECONDS_EACH, MEGABYTES = 10, 4096


class Run:
    """Counts of one run, and its findings: where each was raised → the first input that did it."""

    def __init__(self, targets: list[Any], seconds: float, findings: Path) -> None:
        self.targets, self.folder = targets, findings
        self.counts: Counter[str] = Counter()
        self.found: dict[tuple[str, str, str], str] = {}
        self.slowest = (0.0, "")
        self.ends = time.monotonic() + seconds

    def one(self, data: bytes) -> None:
        """libFuzzer's input: which target, then a seed for a mutation or the file itself."""
        if time.monotonic() >= self.ends:
            self.end()
        if len(data) < 2:
            return
        target = self.targets[data[0] % len(self.targets)]
        content = target.mutate(Random(data[2:])) if data[1] % 2 else data[2:]
        begin = time.monotonic()
        try:
            result = self.verdict(target, content)
        except Exception as error:
            result = "FOUND"
            self._note(target.name, content, error)
        took = time.monotonic() - begin
        self.slowest = max(self.slowest, (took, target.name))
        self.counts[f"{target.name} {result}"] += 1

    def verdict(self, target: Any, content: bytes) -> str:
        from fuzz_targets import verdict

        return verdict(target, content)

    def _note(self, name: str, content: bytes, error: Exception) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if "/tensorpager/" in frame.filename] or frames
        place = f"{Path(own[-1].filename).name}:{own[-1].lineno}"
        key = (name, place, type(error).__name__)
        if key not in self.found:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"{name}-{len(self.found)}"
            path.write_bytes(content)
            self.found[key] = f"{str(error)[:200]!r} ({path})"

    def end(self) -> None:
        """The report, and out: libFuzzer does not come back."""
        print(f"\n{self.counts.total()} inputs")
        for name, count in sorted(self.counts.items()):
            print(f"  {name:26} {count:>9,}")
        print(f"slowest input: {self.slowest[0]:.2f} s ({self.slowest[1]})")
        for (name, place, kind), what in sorted(self.found.items()):
            print(f"FOUND {name}: {kind} at {place}: {what}")
        print(f"{len(self.found)} findings")
        sys.stdout.flush()
        os._exit(1 if self.found else 0)


@click.command(help=__doc__)
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), required=True)
@click.option("--target", "names", multiple=True, help="Only this parser; may come several times.")
@click.option(
    "--findings",
    type=click.Path(path_type=Path),
    default=Path("runs/fuzz-findings"),
    show_default=True,
    help="Folder for inputs that should not have raised.",
)
@click.option(
    "--corpus", type=click.Path(path_type=Path), help="Folder that keeps inputs for later."
)
@click.option("--seed", type=int, default=1, show_default=True)
def main(
    minutes: float, names: tuple[str, ...], findings: Path, corpus: Path | None, seed: int
) -> None:
    try:
        import atheris
    except ImportError:
        raise click.UsageError(
            "atheris is missing; pip install atheris (it is no dependency of tensorpager)"
        ) from None
    with atheris.instrument_imports(include=["tensorpager"]):
        import fuzz_checkpoints
        import fuzz_targets
    targets_by_name = fuzz_targets.TARGETS | fuzz_checkpoints.TARGETS
    unknown = sorted(set(names) - set(targets_by_name))
    if unknown:
        known = ", ".join(targets_by_name)
        raise click.UsageError(f"no target {unknown[0]!r}; choose among {known}")
    targets = [target for name, target in targets_by_name.items() if not names or name in names]
    run = Run(targets, 60 * minutes, findings)
    signal.signal(signal.SIGINT, lambda *_: run.end())
    options = [
        f"-timeout={SECONDS_EACH}",
        f"-rss_limit_mb={MEGABYTES}",
        f"-seed={seed}",
        "-max_len=8192",
        "-print_final_stats=0",
        "-verbosity=0",
        f"-artifact_prefix={findings}/",
    ]
    findings.mkdir(parents=True, exist_ok=True)
    seeds = corpus or findings / "corpus"
    seeds.mkdir(parents=True, exist_ok=True)
    for number, target in enumerate(targets):
        (seeds / f"seed-{target.name}").write_bytes(bytes([number, 0]) + target.seed)
        (seeds / f"nearly-{target.name}").write_bytes(bytes([number, 1]) + b"a seed")
    print(json.dumps({"targets": [target.name for target in targets], "minutes": minutes}))
    atheris.Setup([sys.argv[0], *options, str(seeds)], run.one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
