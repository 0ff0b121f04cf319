"""A rate limit for transfers: each one has a slot of time, one slot after another.

::

    reserve(n)       |---- n / rate ----|---- m / rate ----|
                     ^ now, or the end of the slot before    ^ the transfer of m bytes ends here

A transfer starts at once and is called done at the end of its slot, or later if it takes longer.
Slots follow each other without gaps while there is work, however late a thread wakes up, so
throughput is exactly the rate wherever what is limited is faster. Idle time earns no credit.
"""

import math
import threading
import time
from collections.abc import Callable


class RateLimit:
    """Hands out slots at ``bytes_per_s``; ``None`` means no limit. Thread-safe.

    ``clock`` gives seconds that never go back, ``sleep`` waits for that many. Raises ``ValueError``
    for a rate that is not a finite number above 0.
    """

    def __init__(
        self,
        bytes_per_s: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._sleep = sleep
        self._free_at = -math.inf
        self._bytes_per_s: float | None = None
        self.set(bytes_per_s)

    @property
    def bytes_per_s(self) -> float | None:
        return self._bytes_per_s

    def set(self, bytes_per_s: float | None) -> None:
        """From now on slots are as long as this rate makes them; those handed out stay."""
        if bytes_per_s is not None and not 0 < bytes_per_s < math.inf:
            raise ValueError(
                f"{bytes_per_s=} is not a rate; give bytes per second above 0, or None for no limit"
            )
        with self._lock:
            self._bytes_per_s = bytes_per_s

    def reserve(self, nbytes: int) -> float:
        """The next slot, long enough for ``nbytes``; returns when it ends, for ``wait_until``."""
        with self._lock:
            if self._bytes_per_s is None:
                return -math.inf
            self._free_at = max(self._clock(), self._free_at) + nbytes / self._bytes_per_s
            return self._free_at

    def wait_until(self, end: float) -> None:
        """Blocks, with no lock and without the GIL, until ``end``."""
        while (left := end - self._clock()) > 0:
            self._sleep(left)
