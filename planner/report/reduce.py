"""Less data where more could not be seen: curves of some thousand points, lanes of some 100,000
bars. What matters survives: the peak to the byte, the bytes moved to the page."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..trace import Bools, Floats, Ints


def shares_over_time(
    time: Floats, place: Ints, change: Ints, places: int, length_us: float, bins: int
) -> Floats:
    """Mean level per place and bin of time, [places, bins], of levels that start at 0 and change by
    ``change[i]`` at ``place[i]`` and ``time[i]``."""
    edges = np.linspace(0.0, length_us, bins + 1)
    width = length_us / bins
    mean = np.zeros((places, bins))
    for number in range(places):
        mine = np.flatnonzero(place == number)
        mine = mine[np.argsort(time[mine], kind="stable")]
        when = np.concatenate([[0.0], time[mine], [length_us]])
        level = np.concatenate([[0], np.cumsum(change[mine])])
        area = np.concatenate([[0.0], np.cumsum(np.diff(when) * level)])
        mean[number] = np.diff(np.interp(edges, when, area)) / width
    return np.maximum(mean, 0.0)


class Bars(NamedTuple):
    """Transfers as bars of a lane; ``tensor`` −1: several that were drawn as one."""

    channel: Ints
    begin_us: Floats
    end_us: Floats
    tensor: Ints
    first_page: Ints
    pages: Ints
    op: Ints  # the op that the move belongs to
    arrived: Bools


def fewer_bars(bars: Bars, most: int) -> Bars:
    """``bars``, sorted by channel and begin; neighbours in one channel joined until they are
    ``most`` or, where a channel has few, a little more."""
    count = len(bars.channel)
    if count <= most:
        return bars
    together = -(-count // most)
    channels = np.flatnonzero(np.diff(bars.channel, prepend=-1))
    place = np.arange(count)
    within = place - np.repeat(channels, np.diff(channels, append=count))
    starts = np.flatnonzero(within % together == 0)
    single = np.diff(starts, append=count) == 1
    return Bars(
        bars.channel[starts],
        bars.begin_us[starts],
        np.maximum.reduceat(bars.end_us, starts),
        np.where(single, bars.tensor[starts], -1),
        np.where(single, bars.first_page[starts], 0),
        np.add.reduceat(bars.pages, starts),
        bars.op[starts],
        np.logical_and.reduceat(bars.arrived, starts),
    )
