"""``Trainer(fsdp=…)``: accelerate divides the model, and each rank's part is in pages."""

import json
from pathlib import Path

import pytest
import torch.distributed.run

from ... import programs

pytest.importorskip("transformers")
WORKER = Path(__file__).with_name("fsdp_worker.py")


@pytest.mark.slow
def test_ranks_have_the_bits_of_fsdp2_without_us(tmp_path: Path) -> None:
    """With accumulation and clipping, and from a checkpoint that was written without us."""
    launcher = torch.distributed.run.__file__
    ended = programs.run(launcher, "--standalone", "--nproc-per-node=2", str(WORKER), str(tmp_path))
    assert ended.returncode == 0, ended.stderr[-3000:]
    for rank in range(2):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        plain = found.pop("plain")
        for paged in found.values():
            assert paged["logged"] == plain["logged"]
            assert paged["sha256"] == plain["sha256"]
            stats = paged["stats"]
            assert stats["faults"] > 0
            assert stats["peak_bytes"]["host"] > 0
            assert all(stats["peak_bytes"][t] <= b for t, b in stats["budget_bytes"].items())
