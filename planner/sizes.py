"""Byte counts and times as people write them: ``"20GiB"``, ``"5 GB"``, ``1024``, ``"17.3 µs"``."""

import math
import re

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtpe", start=1):
    _UNITS[_letter] = _UNITS[_letter + "b"] = 1000**_power
    _UNITS[_letter + "i"] = _UNITS[_letter + "ib"] = 1024**_power

DAY_SECONDS = 86_400.0
RATED_BYTES = 600 * 10**12  # of writes: what drives of 1 TB are usually guaranteed for
_LEAST_US = 1e-3
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str | int | float, name: str = "size") -> int:
    """Bytes of ``text``, with dask's units: ``"5GB"`` is 5·10⁹, ``"5GiB"`` is 5·2³⁰.

    ``name`` is what the error calls the value. Raises ``ValueError`` for anything that is not a
    byte count ≥ 0 (a fraction of a byte is rounded down) and ``TypeError`` for other types.
    """
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise TypeError(
            f"{name}={text!r} is not a byte count; pass a string such as '20GiB' or an int of bytes"
        )
    if isinstance(text, int | float):
        if not 0 <= text < float("inf"):
            raise ValueError(f"{name}={text!r} is not a byte count; it must be finite and ≥ 0")
        return int(text)
    match = _PATTERN.fullmatch(text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(
            f"{name}={text!r} is not a byte count; write for example '20GiB' (2³⁰ bytes each), "
            "'5GB' (10⁹ each), '512MiB' or a plain number of bytes"
        )
    scale = _UNITS[match[2].lower()]
    return int(match[1]) * scale if match[1].isdigit() else int(float(match[1]) * scale)


def format_bytes(count: int | float) -> str:
    """``count`` bytes in the largest binary unit that keeps it ≥ 1, such as ``"1.50 GiB"``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{int(size)} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def format_us(us: float) -> str:
    """A time in the unit that suits it: ``"17.3 µs"``, ``"4.20 ms"``, ``"7.31 s"``. What is below
    the instants of the machine model is none."""
    if abs(us) < _LEAST_US:
        us = 0.0
    for limit, scale, unit in ((1e3, 1.0, "µs"), (1e6, 1e3, "ms"), (math.inf, 1e6, "s")):
        if abs(us) < limit * 0.9995 or unit == "s":
            return f"{us / scale:.3g} {unit}" if abs(us) < scale * 1e3 else f"{us / scale:.0f} s"
    raise AssertionError("unreachable")


def years_of_drive(bytes_a_day: float | None) -> float | None:
    """In how many years a drive rated for ``RATED_BYTES`` has had them; ``None`` for no end."""
    return RATED_BYTES / bytes_a_day / 365 if bytes_a_day else None


def wear(bytes_a_day: float | None) -> str:
    """What so much writing does to a drive, in words; nothing where there is none."""
    years = years_of_drive(bytes_a_day)
    if years is None or not bytes_a_day:
        return ""
    drive = f"a drive that is rated for {RATED_BYTES // 10**12} TB of writes"
    if years >= 100:
        return f"So little is written to disk that {drive} lasts 100 years and more."
    amount = (
        f"{bytes_a_day / 1e12:.3g} TB" if bytes_a_day >= 1e12 else f"{bytes_a_day / 1e9:.3g} GB"
    )
    lasts = f"{years:.2g} years" if years >= 1 else f"{365 * years:.3g} days"
    return f"{amount} a day are written to disk: {drive} lasts {lasts}."
