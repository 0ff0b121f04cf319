"""Everything that only a GPU can show, in one go: all gpu-marked tests, a paged training, and a
model of a billion parameters under several memory systems side by side.

    python scripts/gpu_check.py [--json FILE] [--minutes 9]

Needs a CUDA device; says so and exits with 1 where there is none.
"""

import argparse
import datetime
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
BENCH_MODES = "planned,save_on_cpu,torchao,fsdp2,bitsandbytes"
SECONDS_TO_END = 10  # that bench_train.py takes from its last measurement to its end


def run(command: list[str], deadline: float) -> dict[str, object]:
    """Run ``command`` until ``deadline`` (monotonic seconds); how it ended, and its last lines."""
    started = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=max(1.0, deadline - started),
        )
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        code, output = 124, str(late.stdout or "")
    print(output[-4000:], flush=True)
    return {
        "command": " ".join(command),
        "exit_code": code,
        "seconds": round(time.monotonic() - started, 1),
        "tail": output.splitlines()[-30:],
    }


def bench_command(record: Path, deadline: float) -> list[str]:
    """Few steps and one round. It lists what it did not get to before ``deadline``."""
    seconds = max(1.0, deadline - time.monotonic() - SECONDS_TO_END)
    command = [sys.executable, "scripts/bench_train.py", "--device", "cuda", "--preset", "1b"]
    command += ["--share", "75%", "--share", "50%", "--share", "35%", "--clip", "0"]
    command += ["--steps", "5", "--rounds", "1", "--modes", BENCH_MODES]
    return [*command, "--minutes", f"{seconds / 60:.2f}", "--json", str(record)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--minutes", type=float, default=9.0, help="stop after this long")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_check: no CUDA device; nothing was checked", file=sys.stderr)
        return 1
    deadline = time.monotonic() + 60 * options.minutes
    python = sys.executable
    with tempfile.TemporaryDirectory() as folder:
        training = Path(folder) / "train.json"
        compare = [python, "scripts/train_lm.py", "--device", "cuda", "--preset", "350m"]
        compare += ["--steps", "8", "--batch", "8", "--seq", "512", "--compare"]
        compare += ["--device-budget", "50%", "--host-budget", "100%", "--json", str(training)]
        results: dict[str, Any] = {
            "machine": torch.cuda.get_device_name(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "tests": run([python, "-m", "pytest", "-q", "-m", "gpu", "tests"], deadline),
            "training": run(compare, deadline),
        }
        if training.exists():
            results["training_record"] = json.loads(training.read_text())
        side_by_side = Path(folder) / "bench.json"
        results["side_by_side"] = run(bench_command(side_by_side, deadline), deadline)
        if side_by_side.exists():
            results["side_by_side_record"] = json.loads(side_by_side.read_text())
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    parts = ("tests", "training", "side_by_side")
    return max(int(bool(results[name]["exit_code"])) for name in parts)


if __name__ == "__main__":
    sys.exit(main())
