"""What many measurements of ``bench_train.py`` come to: medians, and whether the claims hold."""

import hashlib
import json
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from tensorpager.planner.sizes import format_bytes

from .measure import JOINT, OURS, PLANNED, Case

IDENTICAL = ("plain", *OURS, "checkpoint", "save_on_cpu")  # bit for bit
SPEED_UP_GOAL = 1.3  # of planned over demand, and of joint over moves alone
BOUND_GOAL = 90.0  # percent of the bound's speed
PREDICTION_GOAL = 10.0  # percent off


def summarise(
    case: Case,
    records: list[dict[str, Any]],
    plain: dict[int, dict[str, Any]],
    losses: list[float],
) -> dict[str, Any]:
    """Medians over the rounds of one case. ``records`` are :func:`measure`'s with their ``round``
    or an ``error``; ``plain`` those of plain training by round, for speeds against the same
    round's; ``losses`` are the ones that must come, at least as many as any record has."""
    good = [record for record in records if "error" not in record]
    summary: dict[str, Any] = {"case": asdict(case), "rounds": len(good)}
    for record in records:
        if "error" in record:
            summary |= {"error": record["error"], "refused": record["refused"]}
    if not good:
        return summary
    summary |= {
        "step_seconds": median([s for record in good for s in record["step_seconds"]]),
        "step_cpu_seconds": median([record["step_cpu_seconds"] for record in good]),
        "speed_percent": _speed_percent(good, plain),
        "losses_identical": all(r["losses"] == losses[: len(r["losses"])] for r in good),
        "losses_sha256": [_sha256(record["losses"]) for record in good],
        "warm_up_steps": [record["warm_up_steps"] for record in good],
        "peak_bytes": _largest([record["peak_bytes"] for record in good]),
    }
    if good[0]["pager"] is not None:
        summary |= _summarise_ours([record["pager"] for record in good])
    return summary


def _speed_percent(records: list[dict[str, Any]], plain: dict[int, dict[str, Any]]) -> float | None:
    ratios = [
        median(plain[record["round"]]["step_seconds"]) / median(record["step_seconds"])
        for record in records
        if record["round"] in plain
    ]
    return 100 * median(ratios) if ratios else None


def _summarise_ours(pagers: list[dict[str, Any]]) -> dict[str, Any]:
    """Of :func:`measure`'s ``pager`` of each round."""
    stats = [pager["stats"] for pager in pagers]
    times: dict[str, float | None] = {}
    for name in ("predicted_us", "measured_us", "bound_us", "ideal_us"):
        values = [one[name] for one in stats if one[name] is not None]
        times[name] = median(values) if values else None
    bound, measured = times["bound_us"], times["measured_us"]
    prefetches = sum(pager["timed"]["prefetches"] for pager in pagers)
    hits = sum(pager["timed"]["prefetch_hits"] for pager in pagers)
    steps = [pager["per_step"] for pager in pagers]
    channels = [pager["channel_bytes_per_step"] for pager in pagers]
    return {
        **times,
        "percent_of_bound": 100 * bound / measured if bound and measured else None,
        "prefetch_hit_percent": 100 * hits / prefetches if prefetches else None,
        "per_step": {name: median([step[name] for step in steps]) for name in steps[0]},
        "channel_bytes": {name: median([one[name] for one in channels]) for name in channels[0]},
        "notes": list(dict.fromkeys(note for pager in pagers for note in pager["notes"])),
        "budget_bytes": stats[0]["budget_bytes"],
        "counted_peak_bytes": _largest([one["peak_bytes"] for one in stats]),
        "disk_file_bytes": max(pager["disk_file_bytes"] for pager in pagers),
        "disk_direct": pagers[0]["disk_direct"],
    }


def _largest(numbers: list[dict[str, int]]) -> dict[str, int]:
    return {name: max(one[name] for one in numbers) for name in numbers[0]}


def _sha256(losses: list[float]) -> str:
    return hashlib.sha256(json.dumps(losses).encode()).hexdigest()


def verdicts(summaries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The claims: what they say, and whether they hold (``None``: the bound does not allow it)."""
    found: list[dict[str, Any]] = []
    done = {Case(**s["case"]): s for s in summaries if "step_seconds" in s}
    for case, summary in done.items():
        if case.mode not in PLANNED or summary["measured_us"] is None:
            continue
        for mode in ("demand", *(["planned"] if case.mode in JOINT else [])):
            other = done.get(replace(case, mode=mode))
            if other is not None:
                found.append(_over(mode, case, summary, other))
        percent = summary["percent_of_bound"]
        if percent is not None:
            text = f"{case.name}: {percent:.1f} % of the bound's speed (goal {BOUND_GOAL:.0f} %)"
            found.append({"claim": text, "holds": percent >= BOUND_GOAL})
        off = 100 * (summary["measured_us"] / summary["predicted_us"] - 1)
        text = f"{case.name}: measured is {off:+.1f} % off the predicted time"
        text += f" (goal ±{PREDICTION_GOAL:.0f} %)"
        found.append({"claim": text, "holds": abs(off) <= PREDICTION_GOAL})
    return found + _ahead_of_peers(done)


def _over(mode: str, case: Case, ours: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    ratio = other["step_seconds"] / ours["step_seconds"]
    text = f"{case.name}: {ratio:.2f} × {mode}'s speed (goal {SPEED_UP_GOAL}"
    if ours["bound_us"] is None:
        return {"claim": f"{text})", "holds": ratio >= SPEED_UP_GOAL}
    allowed = other["step_seconds"] * 1e6 / ours["bound_us"]
    holds = ratio >= SPEED_UP_GOAL if allowed >= SPEED_UP_GOAL else None
    return {"claim": f"{text}; the bound allows {allowed:.2f})", "holds": holds}


def _ahead_of_peers(done: dict[Case, dict[str, Any]]) -> list[dict[str, Any]]:
    """On CUDA: against each peer the fastest of ours that takes no more of the device."""
    found: list[dict[str, Any]] = []
    for case, peer in done.items():
        if case.mode in ("plain", *OURS) or "device_reserved" not in peer["peak_bytes"]:
            continue
        limit = peer["peak_bytes"]["device"]
        rivals = [
            (summary["step_seconds"], ours.name)
            for ours, summary in done.items()
            if ours.mode in PLANNED and summary["peak_bytes"]["device"] <= limit
        ]
        if not rivals:
            text = f"none of ours ran within {case.name}'s peak of {format_bytes(limit)}"
            found.append({"claim": text, "holds": None})
            continue
        seconds, name = min(rivals)
        ratio = peer["step_seconds"] / seconds
        text = f"{name}: {ratio:.2f} × {case.name}'s speed, at no higher peak"
        found.append({"claim": text, "holds": ratio > 1})
    return found


def exit_code(summaries: list[dict[str, Any]]) -> int:
    """1 if losses differ that must not, or one of our modes broke rather than was refused."""
    for summary in summaries:
        mode = summary["case"]["mode"]
        if mode in IDENTICAL and not summary.get("losses_identical", True):
            return 1
        if mode in OURS and "error" in summary and not summary["refused"]:
            return 1
    return 0
