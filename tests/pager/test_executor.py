"""Waiting for planned moves."""

import pytest

from tensorpager.pager.disk import watch as io_watch
from tensorpager.pager.errors import PagerError
from tensorpager.pager.moves import executor as executor_module

from .models import make_pager


class _Stuck:
    """A channel that says that it can go on, and never moves a page."""

    name, jobs, busy, blocked = "disk-in", (), True, False

    def can_progress(self) -> bool:
        return True


def test_the_watchdog_says_what_is_stuck_and_nobody_waits_any_more(monkeypatch) -> None:
    monkeypatch.setattr(executor_module, "_WATCHDOG_SECONDS", 0.01)
    monkeypatch.setattr(io_watch, "_TICK_SECONDS", 0.01)
    with make_pager(policy="lp") as pager:
        executor = pager.core.follower.executor
        with monkeypatch.context() as patch:
            patch.setattr(executor, "channels", (_Stuck(),))
            with (
                pager.core.lock,
                pytest.raises(PagerError, match=r"no page moved for .*disk-in moving"),
            ):
                executor.wait()
        assert not executor._waiting
