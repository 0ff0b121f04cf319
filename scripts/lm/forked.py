"""Ranks forked off one process, as ``torchrun`` would start them, with PyTorch loaded once."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_DIGITS = 5  # of a port


def fork_ranks(
    count: int, body: Callable[[int], int | None], local: int | None = None
) -> tuple[dict[int, int], Any]:
    """``body`` of the rank in a child each, ``local`` of them on a node. The rank of each child,
    and the store in which they meet, which has to live as long as they do.

    The store comes after the children, who wait for it: its thread looks up who connects, and one
    that is forked meanwhile would inherit a lock of the resolver that nobody gives back.
    """
    local = local or count
    theirs, ours = os.pipe()
    children = {}
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            os._exit(_child(rank, count, local, body, (theirs, ours)))
        children[pid] = rank
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(ours, f"{store.port:0{_DIGITS}}".encode() * count)
    os.close(ours)
    os.close(theirs)
    return children, store


def _child(
    rank: int, count: int, local: int, body: Callable[[int], int | None], pipe: tuple[int, int]
) -> int:
    code: int | None = 1
    try:
        theirs, ours = pipe
        os.close(ours)
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_RANK": str(rank % local),
            "LOCAL_WORLD_SIZE": str(local),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(int(os.read(theirs, _DIGITS))),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # it is there already
            "GLOO_SOCKET_IFNAME": "lo",
        }
        os.close(theirs)
        code = body(rank)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
    return code or 0
