"""Runs ``train_lm.py`` on several ranks, once for each list of arguments.

    python ranks_worker.py RANKS RANKS_OF_A_NODE '[["--steps=2", …], …]'

The ranks are forked, with PyTorch loaded once. Ends with the exit code of the first that fails.
The last line for each list: the most memory of each rank, in bytes, as the kernel counted.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import torch
import train_lm

from tests.pager.distributed_worker import fork_ranks

ranks, local = map(int, sys.argv[1:3])
torch.set_num_threads(1)
for arguments in json.loads(sys.argv[3]):
    peaks: dict[int, int] = {}
    code = fork_ranks(ranks, lambda given=arguments: sys.exit(train_lm.main(given)), local, peaks)
    if code:
        sys.exit(code)
    print(json.dumps(peaks), flush=True)
