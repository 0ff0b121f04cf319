"""Budgets that are no numbers: shares of what is free, and none at all."""

import resource

import pytest
import torch

import tensorpager as tp
from tensorpager.pager.machine import free_memory
from tensorpager.planner.sizes import format_bytes

GiB = 1 << 30


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 GiB free, of which a container may have 2 GiB, and has used half a GiB."""
    texts = {
        "/proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n",
        "/proc/self/cgroup": "0::/box\n",
        "/sys/fs/cgroup/box/memory.max": f"{2 * GiB}\n",
        "/sys/fs/cgroup/box/memory.current": f"{GiB}\n",
        "/sys/fs/cgroup/box/memory.stat": f"anon 5\ninactive_file {GiB // 2}\n",
    }
    for name, read in (
        ("text_of", lambda path: texts.get(str(path), "")),
        ("number_in", lambda path: int(texts[str(path)]) if str(path) in texts else None),
    ):
        monkeypatch.setattr(free_memory, name, read)


@pytest.mark.usefixtures("machine")
def test_without_budgets() -> None:
    with tp.Pager(device="cpu") as pager:
        assert pager.core.budget_bytes == {"device": int(1.5 * GiB * 0.75), "host": 0, "disk": 0}
        assert "1.12 GiB on the CPU, 75% of the 1.50 GiB that are free" in pager.explain()
        model = pager.page_module(torch.nn.Linear(64, 64))
        with pager.iteration():
            model(torch.ones(2, 64)).sum().backward()


@pytest.mark.usefixtures("machine")
def test_shares() -> None:
    with tp.Pager(device_budget="50%", host_budget=" 12.5 %", device="cpu") as pager:
        taken = {"device": 3 * GiB // 4, "host": 3 * GiB // 16, "disk": 0}
        assert pager.core.budget_bytes == taken
        assert "device_budget='50%' is 768.00 MiB, of 1.50 GiB" in pager.explain()
    with tp.Pager(device_budget="8MiB", device="cpu") as pager:
        assert pager.core.budget_bytes["host"] == 0
        assert "were free" not in pager.explain()


@pytest.mark.parametrize(
    ("budgets", "named"),
    [
        ({"host_budget": "1GiB"}, "device_budget is missing"),
        ({"device_budget": "120%"}, "device_budget='120%'"),
        ({"device_budget": "1GiB", "host_budget": "half%"}, "host_budget='half%'"),
        ({"device_budget": "1GiB", "disk_budget": "50%"}, "disk_budget='50%'"),
    ],
)
def test_what_is_no_share(budgets: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        tp.Pager(device="cpu", **budgets)  # type: ignore[arg-type]


@pytest.mark.parametrize("locked", [resource.RLIM_INFINITY, GiB // 4])
@pytest.mark.usefixtures("machine")
def test_beside_an_accelerator(locked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (10 * GiB, 16 * GiB))
    monkeypatch.setattr(free_memory.resource, "getrlimit", lambda which: (locked, locked))
    monkeypatch.setattr(free_memory.os, "geteuid", lambda: 1000)
    found = free_memory.default_budgets(torch.device("cuda"))
    host = 3 * GiB // 4 if locked == resource.RLIM_INFINITY else GiB // 4
    assert (found.device, found.host) == (9 * GiB, host)
    assert format_bytes(host) in found.words
    assert ("ulimit -l" in found.words) == (locked != resource.RLIM_INFINITY)


def test_a_device_that_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(device: torch.device) -> None:
        raise RuntimeError("not implemented")

    monkeypatch.setattr(torch.accelerator, "get_memory_info", unknown)
    with pytest.raises(ValueError, match="give device_budget in bytes"):
        free_memory.free_of_device(torch.device("xpu"))
