"""Several ranks on one node: what each of them may take of the node's budgets.

All ranks are given the same arguments, and budgets of memory that they share are of the *node*:
host and disk always, and the device too where that is the CPU, whose memory is the host's. Each
rank takes an equal part, rounded down to a byte. The budget of a GPU is that GPU's. Paging files
have no names, so ranks may share a ``disk_path``.

How many ranks share the node is what ``torchrun`` says in ``LOCAL_WORLD_SIZE``. A launcher that
does not set it, or ``LOCAL_WORLD_SIZE=1``, makes each process a node of its own.
"""

from __future__ import annotations

import os

VARIABLE = "LOCAL_WORLD_SIZE"
_MOST = 1 << 16  # ranks of a node; beyond it somebody has put another number there


def ranks_on_node() -> int:
    """Ranks that share this machine's memory and disks: 1 without a launcher.

    Raises ``ValueError`` for a ``LOCAL_WORLD_SIZE`` that is no such number.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return 1
    count = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= count <= _MOST:
        raise ValueError(
            f"{VARIABLE}={text!r} in the environment is not a number of ranks from 1 to {_MOST}; "
            "start with torchrun, which sets it, or unset it"
        )
    return count


def ranks_sharing(tier: str, device_type: str) -> int:
    """How many ranks a budget of ``tier`` (device, host, disk) is divided among."""
    if tier == "device" and device_type != "cpu":
        return 1
    return ranks_on_node()


def share_of(nbytes: int, tier: str, device_type: str) -> int:
    """This rank's part of a budget of ``nbytes``."""
    return nbytes // ranks_sharing(tier, device_type)


def about_share(tier: str, device_type: str) -> str:
    """A sentence to end an error about a rank's part of a budget with; empty if it has it all."""
    ranks = ranks_sharing(tier, device_type)
    if ranks == 1:
        return ""
    return (
        f" These are the figures of one of {ranks} ranks: {tier}_budget is of the node and divided "
        f"by {VARIABLE}, so give {ranks} times as much."
    )


def facts(device_type: str) -> dict[str, int]:
    """For ``stats()``: how many ranks each budget was divided among."""
    return {tier: ranks_sharing(tier, device_type) for tier in ("device", "host", "disk")}


def describe(budget_bytes: dict[str, int], device_type: str) -> str:
    """For ``explain()``: one sentence on the parts of this rank, empty for a rank on its own."""
    from ...planner.sizes import format_bytes

    ranks = ranks_on_node()
    if ranks == 1:
        return ""
    parts = ", ".join(
        f"{format_bytes(nbytes)} {tier}"
        + ("" if ranks_sharing(tier, device_type) > 1 else " (each rank has its own)")
        for tier, nbytes in budget_bytes.items()
        if nbytes
    )
    return f"This is one of {ranks} ranks on the node; its part of the budgets is {parts}."
