"""The arguments of ``Pager``, checked before anything is reserved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch

from ...planner.sizes import format_bytes, parse_bytes
from ..devices.choice import resolve
from ..disk.engine import check_name
from ..errors import InfeasibleBudget
from ..machine.free_memory import default_budgets, free_of_device, free_of_host
from ..machine.ranks import about_share, ranks_sharing, share_of

_MIN_PAGE, _MAX_PAGE = 64 << 10, 16 << 20
_POLICIES = ("lp", "joint", "lru")


class Arguments(NamedTuple):
    """What a user asked for; bytes are this rank's part (``ranks.py``). ``reserve``: bytes for
    dense temporaries, ``None`` if they are to be measured; ``frames``: what the arena begins
    with; ``words``: what budgets were taken of, where they were not numbers."""

    budget_bytes: dict[str, int]
    page_size: int
    reserve: int | None
    frames: int
    disk_path: Path | None
    disk_write_limit: int | None
    device: torch.device
    metrics: bool
    io_engine: str
    words: str


def check_arguments(
    device_budget: int | str | None,
    host_budget: int | str | None,
    disk_budget: int | str | None,
    disk_path: str | os.PathLike[str] | None,
    page_size: int | str,
    dense_reserve: int | str,
    device: str | torch.device | None,
    policy: str,
    metrics: bool | None,
    io_engine: str,
    disk_write_limit: int | str | None,
) -> Arguments:
    """Raises ``InfeasibleBudget`` or ``ValueError`` for what cannot work; see ``Pager``."""
    device = resolve(device)
    given = {"device": device_budget, "host": host_budget, "disk": disk_budget}
    taken, words = _fill_in(given, device)
    budget_bytes = {tier: share_of(nbytes, tier, device.type) for tier, nbytes in taken.items()}
    page_bytes = _check_page_size(parse_bytes(page_size, "page_size"))
    if policy not in _POLICIES:
        raise ValueError(f"policy={policy!r} is unknown; choose one of {', '.join(_POLICIES)}")
    reserve = None
    if dense_reserve != "auto":  # a part of device_budget, and divided as that is
        reserve = share_of(parse_bytes(dense_reserve, "dense_reserve"), "device", device.type)
    frames = _first_frames(budget_bytes["device"], reserve, page_bytes, device.type)
    for tier in ("host", "disk"):
        _check_share(budget_bytes[tier], page_bytes, tier, device.type)
    if budget_bytes["disk"] and disk_path is None:
        raise ValueError(
            f"disk_budget={disk_budget!r} needs a disk_path: the folder for the paging file"
        )
    folder = Path(disk_path) if budget_bytes["disk"] and disk_path is not None else None
    limit = None
    if disk_write_limit is not None:
        limit = parse_bytes(disk_write_limit, "disk_write_limit")
        if folder is None or not limit:
            raise ValueError(
                f"disk_write_limit={disk_write_limit!r} is of bytes a day that go to a paging "
                "file; give disk_budget and disk_path too, and more than 0, or leave it out"
            )
    if metrics is not None and not isinstance(metrics, bool):
        raise ValueError(f"metrics={metrics!r} must be True, False or None")
    return Arguments(
        budget_bytes, page_bytes, reserve, frames, folder, limit, device, bool(metrics),
        check_name(io_engine), words,
    )  # fmt: skip


def _fill_in(
    given: dict[str, int | str | None], device: torch.device
) -> tuple[dict[str, int], str]:
    """Bytes of each tier, and in words what they were taken of where the user gave no numbers."""
    if all(text is None for text in given.values()):
        found = default_budgets(device)
        said = f"No budgets were given, so these were taken: {found.words}."
        return {"device": found.device, "host": found.host, "disk": 0}, said
    if given["device"] is None:
        raise ValueError(
            "device_budget is missing beside the other budgets; give one (as '20GiB', or '80%' of "
            "what is free), or no budget at all"
        )
    taken: dict[str, int] = {}
    words: list[str] = []
    for tier, text in given.items():
        if isinstance(text, str) and text.strip().endswith("%") and tier != "disk":
            free = free_of_device(device) if tier == "device" else free_of_host()
            taken[tier] = int(free * _share(text, f"{tier}_budget"))
            words.append(
                f"{tier}_budget={text!r} is {format_bytes(taken[tier])}, of {format_bytes(free)} "
                "that were free."
            )
        else:
            taken[tier] = 0 if text is None else parse_bytes(text, f"{tier}_budget")
    return taken, " ".join(words)


def _share(text: str, name: str) -> float:
    try:
        percent = float(text.strip()[:-1])
    except ValueError:
        percent = -1.0
    if not 0 < percent <= 100:
        raise ValueError(f"{name}={text!r} is no share of what is free; write '1%' to '100%'")
    return percent / 100


def _check_page_size(size: int) -> int:
    if not _MIN_PAGE <= size <= _MAX_PAGE or size & (size - 1):
        raise ValueError(
            f"page_size={size} is not a power of two from 64 KiB to 16 MiB; try '2MiB', or '64KiB' "
            "for small models"
        )
    return size


def _first_frames(budget: int, reserve: int | None, page_size: int, device_type: str) -> int:
    frames = (budget - (budget // 4 if reserve is None else reserve)) // page_size
    if budget < page_size or (reserve is not None and frames < 1):
        minimum = (reserve or 0) + page_size
        raise InfeasibleBudget(
            f"device_budget of {budget} bytes does not hold one page of {page_size} bytes"
            + (f" beside dense_reserve of {reserve} bytes" if reserve else "")
            + f"; give at least {minimum} bytes, or smaller pages."
            + about_share("device", device_type),
            minimum=minimum * ranks_sharing("device", device_type),
        )
    return max(1, frames)


def _check_share(nbytes: int, page_size: int, tier: str, device_type: str) -> None:
    """A part of a budget that holds no page would be no tier at all, without a word."""
    ranks = ranks_sharing(tier, device_type)
    if ranks > 1 and 0 < nbytes < page_size:
        raise ValueError(
            f"{tier}_budget gives each of {ranks} ranks on this node {nbytes} bytes, less than one "
            f"page of {page_size} bytes; give at least {ranks * page_size} bytes, or smaller pages"
        )
