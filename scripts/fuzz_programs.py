"""Random training programs against plain PyTorch.

    scripts/fuzz_programs.py --seed 7          one program, printed
    scripts/fuzz_programs.py --seeds 0:2000    many; those that break a promise are printed

A program is drawn from its seed: views, in-place ops, casts, indexing, accumulation, checkpointing,
autocast, inference mode, double backward, hooks and threads, under a random budget. Exits with 1 if
one broke a promise (``random_programs/promises.py`` lists them).
"""

from __future__ import annotations

import argparse
import gc
import sys
import warnings

from random_programs.program import draw
from random_programs.promises import broken_promise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int)
    which.add_argument("--seeds", metavar="FIRST:END", help="half-open range")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    if options.seed is not None:
        first, end = options.seed, options.seed + 1
        print(draw(first))
    else:
        first, end = (int(number) for number in options.seeds.split(":"))
    broken = 0
    for seed in range(first, end):
        reason = broken_promise(draw(seed))
        gc.collect()
        if reason:
            broken += 1
            print(f"seed {seed}: {reason}", flush=True)
    print(f"{end - first - broken} of {end - first} programs kept every promise")
    return broken > 0


if __name__ == "__main__":
    sys.exit(main())
