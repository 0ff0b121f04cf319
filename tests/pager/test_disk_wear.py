"""How much is written to disk in a day: counted, told, and limited between iterations."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tensorpager as tp
from tensorpager.pager.disk import wear
from tensorpager.planner.sizes import format_bytes

DAY = 86_400.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The time that the limit sees."""
    now = {"s": 1000.0}
    monkeypatch.setattr(wear.time, "monotonic", lambda: now["s"])
    return now


def trained(folder: Path, **more: Any) -> tuple[tp.Pager, Any]:
    """A pager whose model is in part on disk, and one iteration of its training."""
    pager = tp.Pager(
        device_budget="4MiB", host_budget=0, disk_budget="32MiB", disk_path=folder,
        page_size="64KiB", device="cpu", policy="lru", **more,
    )  # fmt: skip
    torch.manual_seed(0)
    model = pager.page_module(torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8))))
    opt = pager.optimizer(torch.optim.AdamW(model.parameters()))

    def step() -> None:
        with pager.iteration():
            model(torch.ones(4, 256)).square().mean().backward()
            opt.step()
            opt.zero_grad()

    return pager, step


def test_what_a_drive_bears_is_told(tmp_path: Path, clock: dict[str, float]) -> None:
    pager, step = trained(tmp_path)
    with pager:
        assert pager.stats()["disk_wear"]["bytes_a_day"] is None
        before = pager.stats()["disk_bytes_written"]
        step()
        lines = str(pager).splitlines()
        assert lines[0] == "Pager on cpu, pages of 64.00 KiB: 1 iteration, demand"
        moved = format_bytes(pager.stats()["channel_bytes"]["disk-out"])
        assert f"moved: {moved} disk-out, " in lines[-1]
        clock["s"] += DAY / 4
        step()
        stats = pager.stats()
        written = stats["disk_bytes_written"] - before
        assert written > 0
        found = stats["disk_wear"]
        assert found["bytes_a_day"] == pytest.approx(4 * written)
        assert found["years"] == pytest.approx(600e12 / (4 * written) / 365)
        assert (found["written_today"], found["limit"]) == (written, None)
        assert "a drive that is rated for 600 TB of writes lasts" in pager.explain()


def test_no_iteration_begins_beyond_the_limit(tmp_path: Path, clock: dict[str, float]) -> None:
    """Nothing is lost: the state can be saved, and all goes on the next day."""
    pager, step = trained(tmp_path, disk_write_limit="1MiB")
    with pager:
        step()
        while pager.stats()["disk_wear"]["written_today"] < 1 << 20:
            step()
        done = pager.stats()["iterations"]
        clock["s"] += DAY - 7200
        with pytest.raises(tp.DiskWriteLimit, match=r"disk_write_limit=1048576 .* in 2.0 hours"):
            step()
        assert pager.stats()["iterations"] == done
        pager.save(tmp_path / "model.pt", pager.state_dict())
        clock["s"] += 7200
        step()
        assert pager.stats()["iterations"] == done + 1
        assert pager.stats()["disk_wear"]["limit"] == 1 << 20


@pytest.mark.parametrize("limit", [0, "-1", "1 furlong"])
def test_limits_that_make_no_sense(tmp_path: Path, limit: Any) -> None:
    with pytest.raises(ValueError, match="disk_write_limit"):
        trained(tmp_path, disk_write_limit=limit)


def test_a_limit_needs_a_disk() -> None:
    with pytest.raises(ValueError, match=r"disk_write_limit='1GB'.*disk_path"):
        tp.Pager(device_budget="64MiB", disk_write_limit="1GB", device="cpu")
