"""Cases of the machine model worked out by hand, beside those of the case file.

A page has 1,000 bytes; unless a case says otherwise the link takes 10 µs a page in each direction,
the disk alone 40 µs, there is no latency, and the lower tiers have no limit. ``note`` is how it was
worked out: times in µs since the iteration began.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tensorpager.planner.hardware import Hardware
from tensorpager.planner.plan import Deferred, Move, Recompute, StartRun
from tensorpager.planner.trace import READ, READWRITE, WRITE

from .random_plans import PAGE, Access, Case, paged_trace, plan_of, with_choices

TRANSIENT, LASTING = False, True


def reads(tensor: int, begin: int = 0, end: int | None = None) -> Access:
    """Pages [begin, end) of a tensor; all of it if ``end`` is missing."""
    return Access(tensor, begin, -1 if end is None else end, READ)


def writes(tensor: int, begin: int = 0, end: int | None = None) -> Access:
    return Access(tensor, begin, -1 if end is None else end, WRITE)


def updates(tensor: int) -> Access:
    return Access(tensor, 0, -1, READWRITE)


class M(NamedTuple):
    """A move of pages [begin, end) of tensor ``tensor`` (its place in the case's list)."""

    op: int
    action: str
    tier: str
    tensor: int
    begin: int
    end: int


@dataclass(frozen=True)
class HandCase:
    name: str
    note: str
    device_pages: float
    tensors: list[tuple[int, bool]]  # pages, lives across iterations
    ops: list[tuple[float, list[Access]]]  # duration in µs
    moves: list[M]
    start: list[tuple[str, int, int, int]] = field(
        default_factory=list
    )  # tier, tensor, [begin, end)
    hardware: dict[str, Any] = field(default_factory=dict)
    expect: dict[str, float] = field(default_factory=dict)  # of ``Predicted``; empty: infeasible
    reason: str = ""  # what the validator says of an infeasible plan
    rerun: tuple[int, ...] = ()  # ops that may run again
    host_us: dict[int, float] = field(default_factory=dict)
    recompute: list[tuple[int, int, int]] = field(default_factory=list)
    host_steps: list[int] = field(default_factory=list)
    deferred: list[tuple[int, int]] = field(default_factory=list)

    def build(self) -> Case:
        ops = [
            [
                a if a.end >= 0 else Access(a.tensor, 0, self.tensors[a.tensor][0], a.mode)
                for a in op
            ]
            for _, op in self.ops
        ]
        trace = paged_trace(self.tensors, [duration for duration, _ in self.ops], ops)
        trace = with_choices(trace, self.rerun, self.host_us)
        values: dict[str, Any] = {
            "device_bytes": self.device_pages * PAGE,
            "host_bytes": float("inf"),
            "disk_bytes": float("inf"),
            "d2h_bytes_per_s": 1e8,
            "h2d_bytes_per_s": 1e8,
            "disk_read_bytes_per_s": 2.5e7,
            "disk_write_bytes_per_s": 2.5e7,
            "page_size": PAGE,
        }
        hardware = Hardware(**{**values, **self.hardware})
        moves = [
            Move(10 * m.tensor + 3, m.begin, m.end - m.begin, m.tier, m.action, m.op)
            for m in self.moves
        ]
        start = [
            StartRun(10 * t + 3, begin, end - begin, tier) for tier, t, begin, end in self.start
        ]
        plan = replace(
            plan_of(hardware, moves, start),
            recompute=[Recompute(*each) for each in self.recompute],
            host_steps=self.host_steps,
            deferred=[Deferred(*each) for each in self.deferred],
        )
        return Case(trace, hardware, plan)


FAST_DISK = {"disk_read_bytes_per_s": 1e8, "disk_write_bytes_per_s": 1e8}

FEASIBLE = [
    HandCase(
        "stall_for_frames",
        "op 1 needs both frames of tensor 0: out 10 to 30, op 1 30 to 40, in 40 to 60, op 2 to 70",
        3,
        [(3, TRANSIENT), (2, TRANSIENT)],
        [(10, [writes(0)]), (10, [writes(1)]), (10, [reads(0)])],
        [M(1, "out", "host", 0, 0, 2), M(2, "in", "host", 0, 0, 2)],
        expect={
            "iteration_us": 70,
            "stall_us": 40,
            "peak_device_bytes": 3000,
            "peak_host_bytes": 2000,
            "bytes_out": 2000,
            "bytes_in": 2000,
        },
    ),
    HandCase(
        "an_op_starts_as_soon_as_its_frames_are_free",
        "one frame is enough: op 1 20 to 30 while page 1 still goes out, in 30 to 50, op 2 to 60",
        3,
        [(3, TRANSIENT), (1, TRANSIENT)],
        [(10, [writes(0)]), (10, [writes(1)]), (10, [reads(0)])],
        [M(1, "out", "host", 0, 0, 2), M(2, "in", "host", 0, 0, 2)],
        expect={"iteration_us": 60, "peak_device_bytes": 3000},
    ),
    HandCase(
        "host_starves_in_mid_page",
        "host page begins at 10, has 4 of its 10 µs when the disk, as fast as the link, starts at "
        "14: disk to 34, host to 40, op 2 to 50; then disk in to 70, host in to 80, op 3 to 90",
        3,
        [(2, TRANSIENT), (1, TRANSIENT), (3, TRANSIENT)],
        [(10, [writes(0), writes(1)]), (4, []), (10, [writes(2)]), (10, [reads(0), reads(1)])],
        [
            M(1, "out", "host", 1, 0, 1),
            M(2, "out", "disk", 0, 0, 2),
            M(3, "in", "host", 1, 0, 1),
            M(3, "in", "disk", 0, 0, 2),
        ],
        hardware=FAST_DISK,
        expect={"iteration_us": 90, "disk_bytes_written": 2000, "bytes_out": 3000},
    ),
    HandCase(
        "rate_changes_twice",
        "host page 0 is half done at 15 when the disk takes a quarter of the link: 21.67, 35, "
        "48.33; page 3 has two thirds at 55 when the disk is idle again: 60, 70. op 2 to 80, "
        "host in to 130, op 3 to 140, disk in to 180, op 4 to 190",
        6,
        [(1, TRANSIENT), (5, TRANSIENT), (6, TRANSIENT)],
        [
            (10, [writes(0), writes(1)]),
            (5, []),
            (10, [writes(2)]),
            (10, [reads(1)]),
            (10, [reads(0)]),
        ],
        [
            M(1, "out", "host", 1, 0, 5),
            M(2, "out", "disk", 0, 0, 1),
            M(3, "in", "host", 1, 0, 5),
            M(4, "in", "disk", 0, 0, 1),
        ],
        expect={"iteration_us": 190, "disk_bytes_written": 1000, "peak_host_bytes": 5000},
    ),
    HandCase(
        "latency_of_a_move_not_of_a_page",
        "out 17 to 47, op 1 to 57, in 64 to 94, op 2 to 104",
        3,
        [(3, TRANSIENT), (3, TRANSIENT)],
        [(10, [writes(0)]), (10, [writes(1)]), (10, [reads(0)])],
        [M(1, "out", "host", 0, 0, 3), M(2, "in", "host", 0, 0, 3)],
        hardware={"transfer_latency_us": 7.0},
        expect={"iteration_us": 104},
    ),
    HandCase(
        "latency_of_each_move_in_turn",
        "outs 17 to 27 and 34 to 54, op 1 to 64, in 71 to 101, op 2 to 111",
        3,
        [(3, TRANSIENT), (3, TRANSIENT)],
        [(10, [writes(0)]), (10, [writes(1)]), (10, [reads(0)])],
        [
            M(1, "out", "host", 0, 0, 1),
            M(1, "out", "host", 0, 1, 3),
            M(2, "in", "host", 0, 0, 3),
        ],
        hardware={"transfer_latency_us": 7.0},
        expect={"iteration_us": 111},
    ),
    HandCase(
        "latency_passes_while_the_head_waits_for_its_copy",
        "out 17, 27, 37; the in is the head of its queue from 15 on, ready at 22: 27 to 37 to 47",
        2,
        [(2, TRANSIENT)],
        [(10, [writes(0)]), (5, []), (10, [reads(0)])],
        [M(1, "out", "host", 0, 0, 2), M(2, "in", "host", 0, 0, 2)],
        hardware={"transfer_latency_us": 7.0},
        expect={"iteration_us": 57},
    ),
    HandCase(
        "clean_from_the_start",
        "in 0 to 40, op 0 to 50; its copy is still valid: out is free, op 1 50 to 60",
        2,
        [(1, LASTING), (2, TRANSIENT)],
        [(10, [reads(0)]), (10, [writes(1)])],
        [M(0, "in", "disk", 0, 0, 1), M(1, "out", "disk", 0, 0, 1)],
        [("disk", 0, 0, 1)],
        expect={
            "iteration_us": 60,
            "bytes_out": 0,
            "bytes_in": 1000,
            "disk_bytes_written": 0,
            "peak_disk_bytes": 1000,
        },
    ),
    HandCase(
        "written_and_so_not_clean",
        "in 0 to 40, op 0 to 50, out to 90, op 1 to 100",
        2,
        [(1, LASTING), (2, TRANSIENT)],
        [(10, [updates(0)]), (10, [writes(1)])],
        [M(0, "in", "disk", 0, 0, 1), M(1, "out", "disk", 0, 0, 1)],
        [("disk", 0, 0, 1)],
        expect={"iteration_us": 100, "bytes_out": 1000, "disk_bytes_written": 1000},
    ),
    HandCase(
        "an_in_goes_on_into_the_next_iteration",
        "op 0 to 10, out to 20, op 1 to 30, op 2 to 34 while the page comes in till 40: from the "
        "second iteration on op 0 waits for 6, so 34, 40, 40",
        2,
        [(1, LASTING), (2, TRANSIENT)],
        [(10, [updates(0)]), (10, [writes(1)]), (4, [])],
        [M(1, "out", "host", 0, 0, 1), M(2, "in", "host", 0, 0, 1)],
        expect={"iteration_us": 40, "bytes_out": 1000, "bytes_in": 1000},
    ),
    HandCase(
        "what_is_not_needed_need_not_come_back",
        "out 10 to 30, op 1 to 40, page 1 in to 50, op 2 to 60; page 0's slot is free with it",
        2,
        [(2, TRANSIENT), (2, TRANSIENT)],
        [(10, [writes(0)]), (10, [writes(1)]), (10, [reads(0, 1, 2)])],
        [M(1, "out", "host", 0, 0, 2), M(2, "in", "host", 0, 1, 2)],
        hardware={"host_bytes": 2000},
        expect={"iteration_us": 60, "bytes_in": 1000, "peak_host_bytes": 2000},
    ),
    HandCase(
        "only_the_pages_written_lose_their_copies",
        "out to 30, op 1 to 40, in to 60, op 2 writes page 0 to 70; page 0 out to 80 (page 1 is "
        "clean), op 3 to 90, in to 110, op 4 to 120",
        2,
        [(2, TRANSIENT), (2, TRANSIENT), (2, TRANSIENT)],
        [
            (10, [writes(0)]),
            (10, [writes(1)]),
            (10, [reads(0), writes(0, 0, 1)]),
            (10, [writes(2)]),
            (10, [reads(0)]),
        ],
        [
            M(1, "out", "host", 0, 0, 2),
            M(2, "in", "host", 0, 0, 2),
            M(3, "out", "host", 0, 0, 2),
            M(4, "in", "host", 0, 0, 2),
        ],
        expect={"iteration_us": 120, "bytes_out": 3000, "bytes_in": 4000},
    ),
    HandCase(
        "a_dying_tensor_ends_its_moves",
        "page 1 goes out from 10 on; op 1, the tensor's last, ends at 15: its frame and its slot "
        "are free before it has arrived, op 2 15 to 25",
        2,
        [(2, TRANSIENT), (2, TRANSIENT)],
        [(10, [writes(0)]), (5, [reads(0, 0, 1)]), (10, [writes(1)])],
        [M(1, "out", "host", 0, 1, 2)],
        expect={"iteration_us": 25, "bytes_out": 0, "peak_host_bytes": 1000},
    ),
    HandCase(
        "a_drop_waits_for_an_out_to_the_other_tier",
        "host out to 20, in to 30, op 2 to 40; disk out 40 to 80, only then the host slot is free: "
        "tensor 1 out to 90, in to 100, op 4 to 110; disk in to 150, op 5 to 160",
        2,
        [(1, TRANSIENT), (1, TRANSIENT)],
        [
            (10, [writes(0), writes(1)]),
            (10, []),
            (10, [reads(0)]),
            (5, []),
            (10, [reads(1)]),
            (10, [reads(0)]),
        ],
        [
            M(1, "out", "host", 0, 0, 1),
            M(2, "in", "host", 0, 0, 1),
            M(3, "out", "disk", 0, 0, 1),
            M(3, "drop", "host", 0, 0, 1),
            M(3, "out", "host", 1, 0, 1),
            M(4, "in", "host", 1, 0, 1),
            M(5, "in", "disk", 0, 0, 1),
        ],
        hardware={"host_bytes": 1000},
        expect={"iteration_us": 160, "peak_host_bytes": 1000, "peak_disk_bytes": 1000},
    ),
    HandCase(
        "a_drop_gives_slots_back_page_by_page",
        "out to 30; in to 40 and 50; page 0's slot is free at 40, tensor 1 out to 50, op 3 to 60, "
        "in to 70, op 4 to 80",
        3,
        [(2, TRANSIENT), (1, TRANSIENT), (1, TRANSIENT)],
        [
            (10, [writes(0), writes(1)]),
            (20, []),
            (12, []),
            (10, [writes(2)]),
            (10, [reads(0), reads(1)]),
        ],
        [
            M(1, "out", "host", 0, 0, 2),
            M(2, "in", "host", 0, 0, 2),
            M(2, "drop", "host", 0, 0, 2),
            M(2, "out", "host", 1, 0, 1),
            M(4, "in", "host", 1, 0, 1),
        ],
        hardware={"host_bytes": 2000},
        expect={"iteration_us": 80, "peak_host_bytes": 2000},
    ),
    HandCase(
        "each_of_two_drops_of_a_page_counts",
        "copies in both tiers; both drops wait for the in, 60 to 70; the host slot is free at 70: "
        "tensor 1 out to 80, in to 90, op 5 to 100",
        2,
        [(1, TRANSIENT), (1, TRANSIENT)],
        [
            (10, [writes(0), writes(1)]),
            (10, []),
            (10, [reads(0)]),
            (20, []),
            (5, [reads(0)]),
            (10, [reads(0), reads(1)]),
        ],
        [
            M(1, "out", "host", 0, 0, 1),
            M(2, "in", "host", 0, 0, 1),
            M(3, "out", "disk", 0, 0, 1),
            M(4, "in", "host", 0, 0, 1),
            M(4, "drop", "host", 0, 0, 1),
            M(4, "drop", "disk", 0, 0, 1),
            M(4, "out", "host", 1, 0, 1),
            M(5, "in", "host", 1, 0, 1),
        ],
        hardware={"host_bytes": 1000, **FAST_DISK},
        expect={"iteration_us": 100, "peak_host_bytes": 1000, "bytes_out": 3000},
    ),
    HandCase(
        "the_disk_queue_takes_a_frame_first",
        "one frame is free at 10: the disk page 10 to 50, the host page when op 1 has ended 60 to "
        "70, op 2 to 80, op 3 to 81",
        2,
        [(1, LASTING), (1, LASTING), (2, TRANSIENT), (1, TRANSIENT)],
        [(10, [writes(2)]), (50, [writes(3)]), (10, [reads(0), reads(1)]), (1, [])],
        [
            M(0, "in", "host", 1, 0, 1),
            M(0, "in", "disk", 0, 0, 1),
            M(3, "out", "disk", 0, 0, 1),
            M(3, "out", "host", 1, 0, 1),
        ],
        [("disk", 0, 0, 1), ("host", 1, 0, 1)],
        expect={"iteration_us": 81, "bytes_out": 0, "bytes_in": 2000},
    ),
    HandCase(
        "a_head_that_waits_for_its_copy_holds_up_its_queue",
        "outs to 40 and 50; in of tensor 0 to 60, only then tensor 1's to 70, op 2 to 80, op 3 to "
        "90, in to 120, op 4 to 130, op 5 to 131",
        6,
        [(1, TRANSIENT), (1, LASTING), (3, TRANSIENT)],
        [
            (10, [writes(0), writes(2)]),
            (5, []),
            (10, [reads(1)]),
            (10, [reads(0)]),
            (10, [reads(2)]),
            (1, []),
        ],
        [
            M(1, "out", "host", 2, 0, 3),
            M(1, "out", "host", 0, 0, 1),
            M(1, "in", "host", 0, 0, 1),
            M(1, "in", "host", 1, 0, 1),
            M(4, "in", "host", 2, 0, 3),
            M(5, "out", "host", 1, 0, 1),
        ],
        [("host", 1, 0, 1)],
        expect={"iteration_us": 131, "bytes_out": 4000, "bytes_in": 5000},
    ),
    HandCase(
        "the_first_iteration_is_another",
        "nothing is below at first: out 10 to 20, op 1 to 30, in to 40, op 2 to 50; the copy "
        "stays, so from the second iteration on the out is free: 40",
        2,
        [(1, LASTING), (2, TRANSIENT)],
        [(10, [reads(0)]), (10, [writes(1)]), (10, [reads(0)])],
        [M(1, "out", "host", 0, 0, 1), M(2, "in", "host", 0, 0, 1)],
        expect={"iteration_us": 40, "bytes_out": 0, "bytes_in": 1000},
    ),
    HandCase(
        "a_drop_of_nothing",
        "neither the page on the device nor the dead one has a copy to drop",
        2,
        [(1, LASTING), (1, TRANSIENT)],
        [(10, [writes(0), writes(1)]), (10, [reads(0)])],
        [M(0, "drop", "disk", 0, 0, 1), M(1, "drop", "host", 1, 0, 1)],
        expect={"iteration_us": 20, "peak_device_bytes": 2000, "peak_host_bytes": 0},
    ),
    HandCase(
        "back_from_host_while_it_goes_out_to_disk",
        "host out to 20, in to 30, op 2 to 40; disk out 40 to 80; the host copy is still valid: in "
        "45 to 55 to a second frame, op 4 to 65, op 5 to 85",
        2,
        [(1, TRANSIENT)],
        [
            (10, [writes(0)]),
            (10, []),
            (10, [reads(0)]),
            (5, []),
            (10, [reads(0)]),
            (20, [reads(0)]),
        ],
        [
            M(1, "out", "host", 0, 0, 1),
            M(2, "in", "host", 0, 0, 1),
            M(3, "out", "disk", 0, 0, 1),
            M(4, "in", "host", 0, 0, 1),
        ],
        expect={"iteration_us": 85, "peak_device_bytes": 2000, "disk_bytes_written": 1000},
    ),
    HandCase(
        "written_before_its_copy_has_arrived",
        "as above, but op 4 writes: what reaches the disk at 80 is void, so the next out takes 85 "
        "to 125, in to 165, op 7 to 175",
        2,
        [(1, TRANSIENT)],
        [
            (10, [writes(0)]),
            (10, []),
            (10, [reads(0)]),
            (5, []),
            (10, [updates(0)]),
            (20, [reads(0)]),
            (1, []),
            (10, [reads(0)]),
        ],
        [
            M(1, "out", "host", 0, 0, 1),
            M(2, "in", "host", 0, 0, 1),
            M(3, "out", "disk", 0, 0, 1),
            M(4, "in", "host", 0, 0, 1),
            M(6, "out", "disk", 0, 0, 1),
            M(7, "in", "disk", 0, 0, 1),
        ],
        hardware={"disk_bytes": 1000},
        expect={"iteration_us": 175, "disk_bytes_written": 2000, "peak_disk_bytes": 1000},
    ),
    HandCase(
        "a_part_of_a_page_is_no_frame",
        "2,999 bytes are two frames: page 0 must go out, 10 to 20, before op 1, to 30; in to 40",
        2.999,
        [(2, TRANSIENT), (1, TRANSIENT)],
        [(10, [writes(0)]), (10, [writes(1)]), (10, [reads(0)])],
        [M(1, "out", "host", 0, 0, 1), M(2, "in", "host", 0, 0, 1)],
        expect={"iteration_us": 50, "peak_device_bytes": 2000},
    ),
]


def _three_ops(name: str, reason: str, *moves: M, **changes: Any) -> HandCase:
    """Tensor 0 (2 pages) is written, 20 µs pass, it is read; tensor 1 (a page) lasts."""
    values: dict[str, Any] = {
        "device_pages": 3,
        "tensors": [(2, TRANSIENT), (1, LASTING)],
        "ops": [(10, [writes(0)]), (20, [reads(1)]), (10, [reads(0)])],
    }
    return HandCase(name, "", **{**values, **changes}, moves=list(moves), reason=reason)


INFEASIBLE = [
    _three_ops("no_such_op", "issue_op -1", M(-1, "out", "host", 0, 0, 1)),
    _three_ops("no_such_tensor", "no tensor 73", M(1, "out", "host", 7, 0, 1)),
    _three_ops("no_such_page", "among the 2", M(1, "out", "host", 0, 1, 3)),
    _three_ops("no_pages", "pages 1 to 1", M(1, "out", "host", 0, 1, 1)),
    _three_ops("no_such_tier", "'tape'", M(1, "out", "tape", 0, 0, 1)),
    _three_ops("no_such_action", "'copy'", M(1, "copy", "host", 0, 0, 1)),
    _three_ops("start_of_a_transient", "across iterations", start=[("host", 0, 0, 1)]),
    _three_ops("start_twice", "twice", start=[("host", 1, 0, 1), ("disk", 1, 0, 1)]),
    _three_ops("start_does_not_fit_below", "all 0 pages of disk", start=[("disk", 1, 0, 1)],
               hardware={"disk_bytes": 999}),
    _three_ops("start_does_not_fit_here", "does not fit on the device", device_pages=2,
               tensors=[(2, TRANSIENT), (3, LASTING)]),
    _three_ops("no_in", "op 2 (op2): it accesses page 0 of tensor 3, which is in host with no 'in'",
               M(1, "out", "host", 0, 0, 2)),
    _three_ops("no_in_and_still_leaving", "is on its way out to disk with no 'in'",
               M(2, "out", "disk", 0, 0, 2)),
    _three_ops("no_in_in_the_first_place", "op 1 (op1): it accesses page 0 of tensor 13",
               start=[("host", 1, 0, 1)]),
    _three_ops("out_twice", "moves[1], 'out' with disk: page 0 of tensor 3 is on its way out",
               M(1, "out", "host", 0, 0, 2), M(1, "out", "disk", 0, 0, 2)),
    _three_ops("out_while_away", "page 0 of tensor 3 is in host, not on the device",
               M(1, "out", "host", 0, 0, 2), M(2, "out", "disk", 0, 0, 1)),
    _three_ops("out_while_coming", "is on its way in from host, not on the device",
               M(1, "out", "host", 0, 0, 2), M(2, "in", "host", 0, 0, 2),
               M(2, "out", "host", 0, 0, 2)),
    _three_ops("out_with_an_earlier_one_on_its_way", "an earlier 'out' to disk on its way",
               M(0, "in", "host", 1, 0, 1),
               M(1, "out", "disk", 1, 0, 1), M(1, "in", "host", 1, 0, 1),
               M(2, "out", "host", 1, 0, 1), start=[("host", 1, 0, 1)], device_pages=4,
               ops=[(10, [reads(1), writes(0)]), (1, [reads(1)]), (10, [])]),
    _three_ops("out_before_birth", "is not alive", M(0, "out", "host", 0, 0, 2)),
    _three_ops("in_while_here", "moves[0], 'in' with host: page 0 of tensor 3 is on the device",
               M(1, "in", "host", 0, 0, 2)),
    _three_ops("in_twice", "'in' queued already", M(1, "out", "host", 0, 0, 2),
               M(2, "in", "host", 0, 0, 2), M(2, "in", "host", 0, 1, 2)),
    _three_ops("in_from_another_tier", "no valid copy in disk",
               M(1, "out", "host", 0, 0, 2), M(2, "in", "disk", 0, 0, 2)),
    _three_ops("drop_of_the_only_copy", "no other copy than host's",
               M(1, "out", "host", 0, 0, 2), M(2, "drop", "host", 0, 0, 1),
               M(2, "in", "host", 0, 0, 2)),
    _three_ops("drop_of_the_only_copy_once_it_has_arrived", "no other copy than host's",
               M(1, "out", "host", 0, 0, 2), M(1, "drop", "host", 0, 1, 2),
               M(1, "in", "host", 0, 0, 2)),
    _three_ops("drop_of_the_only_copy_in_the_next_iteration", "nowhere: its copy is dropped",
               M(0, "in", "disk", 1, 0, 1), M(0, "drop", "disk", 1, 0, 1),
               M(2, "out", "disk", 1, 0, 1), M(2, "drop", "disk", 1, 0, 1),
               start=[("disk", 1, 0, 1)]),
    _three_ops("ends_below", "page 0 of tensor 13 ends in host but starts on the device",
               M(2, "out", "host", 1, 0, 1)),
    _three_ops("ends_here", "ends on the device but starts in disk", M(0, "in", "disk", 1, 0, 1),
               start=[("disk", 1, 0, 1)]),
    _three_ops("ends_in_another_tier", "ends in disk but starts in host",
               M(0, "in", "host", 1, 0, 1), M(0, "drop", "host", 1, 0, 1),
               M(2, "out", "disk", 1, 0, 1), start=[("host", 1, 0, 1)]),
    _three_ops("working_set", "waits for ever for 2 frames", device_pages=2),
    _three_ops("never_a_slot", "moves[0] waits for a slot in host for page 1",
               M(1, "out", "host", 0, 0, 2), M(2, "in", "host", 0, 0, 2),
               hardware={"host_bytes": 1999}),
    _three_ops("never_a_frame", "moves[1] waits for a frame for page 0 of tensor 13",
               M(2, "out", "host", 1, 0, 1), M(1, "in", "host", 1, 0, 1),
               device_pages=2, start=[("host", 1, 0, 1)]),
    _three_ops("never_a_copy", "moves[1] waits for the copy of page 0 of tensor 3 in host",
               M(1, "out", "host", 0, 0, 2), M(2, "in", "host", 0, 0, 2),
               hardware={"host_bytes": 0}),
]  # fmt: skip
