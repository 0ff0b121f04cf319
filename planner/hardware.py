"""The machine that a plan is for: tiers, rates, page size. TOML files and presets."""

from __future__ import annotations

import math
import sys
import tomllib
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from .errors import HardwareError
from .shown import shown
from .sizes import format_bytes, parse_bytes

MAX_SIZE = 1 << 60  # bytes of a page: more has no meaning, and sums would overflow
MAX_LATENCY_US = 1e12


@dataclass(frozen=True)
class Hardware:
    """Sizes in bytes (``inf``: no limit), rates in bytes per second, latency in µs."""

    device_bytes: float
    host_bytes: float = 0
    disk_bytes: float = 0
    d2h_bytes_per_s: float = 15.754e9
    h2d_bytes_per_s: float = 15.754e9
    disk_read_bytes_per_s: float = 3.2e9
    disk_write_bytes_per_s: float = 3.2e9
    transfer_latency_us: float = 0.0
    page_size: int = 2 << 20
    host_adam_bytes_per_s: float = 50e9  # that the host's AdamW reads and writes, by itself

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
                raise HardwareError(f"{name} = {shown(value)} is not a number")
            if value < 0:
                raise HardwareError(f"{name} = {shown(value)} is negative")
            if sys.float_info.max < value != math.inf:
                raise HardwareError(f"{name} = {shown(value)} is more than a float holds")
        for name in ("device_bytes", "page_size", *(n for n in _names() if n.endswith("_per_s"))):
            if getattr(self, name) == 0:
                raise HardwareError(f"{name} = 0: it must be more")
            if getattr(self, name) < 1:
                raise HardwareError(f"{name} = {getattr(self, name)} is less than a byte")
        if not float(self.page_size).is_integer() or self.page_size > MAX_SIZE:
            raise HardwareError(f"page_size = {self.page_size} is not whole, or above {MAX_SIZE}")
        object.__setattr__(self, "page_size", int(self.page_size))  # a file may say 2e6
        if self.transfer_latency_us > MAX_LATENCY_US:
            raise HardwareError(
                f"transfer_latency_us = {self.transfer_latency_us} is above {MAX_LATENCY_US:g}"
            )

    @property
    def device_pages(self) -> float:
        """Whole pages that fit (an int, or ``inf``)."""
        return _pages(self.device_bytes, self.page_size)

    @property
    def host_pages(self) -> float:
        return _pages(self.host_bytes, self.page_size)

    @property
    def disk_pages(self) -> float:
        return _pages(self.disk_bytes, self.page_size)

    def page_us(self, tier: str, action: str) -> float:
        """µs that a page takes out to ``tier`` or in from there, alone and without latency. What
        goes to or from the disk passes the link."""
        rate = self.d2h_bytes_per_s if action == "out" else self.h2d_bytes_per_s
        disk = self.disk_write_bytes_per_s if action == "out" else self.disk_read_bytes_per_s
        return self.page_size / float(min(rate, disk) if tier == "disk" else rate) * 1e6

    def with_(self, **changes: Any) -> Hardware:
        """A copy with some fields changed; ``None`` leaves a field as it is."""
        return replace(self, **{name: v for name, v in changes.items() if v is not None})


def _names() -> list[str]:
    return [item.name for item in fields(Hardware)]


def _pages(nbytes: float, page_size: int) -> float:
    return math.inf if math.isinf(nbytes) else int(nbytes) // int(page_size)


@dataclass(frozen=True)
class Compute:
    """What a device computes: floating-point operations per second in 16 bits (products summed in
    32) and in 32 bits, and bytes per second of its memory, by data sheet; and the shares of these
    that large products and elementwise kernels reach. Plans do not need it, estimates do."""

    flops_per_s: float
    flops_32_per_s: float
    memory_bytes_per_s: float
    flops_share: float = 0.55
    memory_share: float = 0.85

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise HardwareError(f"compute.{name} = {shown(value)} is not a number")
            if not 0 < value < math.inf or (name.endswith("share") and value > 1):
                raise HardwareError(f"compute.{name} = {shown(value)} is not possible")

    def seconds(self, flops: float, nbytes: float, itemsize: int) -> float:
        """A roofline: of an op with elements of ``itemsize`` bytes."""
        peak = self.flops_per_s if itemsize <= 2 else self.flops_32_per_s
        return max(
            flops / (peak * self.flops_share),
            nbytes / (self.memory_bytes_per_s * self.memory_share),
        )


GiB, GB = 1 << 30, 10**9
PRESETS = {
    # As G10's authors assume, with our page size.
    "g10": Hardware(40 * GiB, 128 * GiB, math.inf),
    # Data sheets: link rates are what a copy reaches of PCIe 4 or 5 x16, disks one good NVMe drive.
    "a100": Hardware(40 * GiB, 256 * GiB, math.inf, 25e9, 25e9, 6.5e9, 4e9, 10.0),
    "h200": Hardware(141 * 10**9, 1024 * GiB, math.inf, 55e9, 55e9, 12e9, 8e9, 10.0),
    # What a process gets of 24 GiB, and of 128 or 64 GB beside the system's 8.
    "rtx4090": Hardware(24 * GB, 120 * GB, 4000 * GB, 25e9, 25e9, 7e9, 6e9, 10.0),
    "rtx4090-64": Hardware(24 * GB, 56 * GB, 4000 * GB, 25e9, 25e9, 7e9, 6e9, 10.0),
    # Alone on a socket with eight channels of memory; as one of eight GPUs; NVLink-C2C as measured.
    "h100": Hardware(
        79 * GB, 500 * GB, 4000 * GB, 55e9, 55e9, 12e9, 8e9, 10.0, host_adam_bytes_per_s=200e9
    ),
    "h100-of-8": Hardware(79 * GB, 240 * GB, 4000 * GB, 55e9, 55e9, 6e9, 4e9, 10.0),
    "gh200": Hardware(
        94 * GB, 440 * GB, 4000 * GB, 297e9, 375e9, 12e9, 8e9, 10.0, host_adam_bytes_per_s=350e9
    ),
    # What a process gets of 32, 180 and 192 GB; PCIe 5 x16 each.
    "rtx5090": Hardware(32 * GB, 120 * GB, 4000 * GB, 55e9, 55e9, 12e9, 8e9, 10.0),
    "b200": Hardware(
        179 * GB, 1000 * GB, 4000 * GB, 55e9, 55e9, 12e9, 8e9, 10.0, host_adam_bytes_per_s=200e9
    ),
    "mi300x": Hardware(
        191 * GB, 1000 * GB, 4000 * GB, 55e9, 55e9, 12e9, 8e9, 10.0, host_adam_bytes_per_s=200e9
    ),
    "cpu": Hardware(8 * GiB, 16 * GiB, math.inf, 8e9, 8e9, 2e9, 1.5e9, 5.0),
}
# Dense 16-bit and 32-bit operations and memory, from the data sheets of the 24 GB RTX 4090, the
# 40 GB A100, H100, H200 and B200 as SXM; eight cores with AVX2 and two channels of memory.
COMPUTE = {
    "a100": Compute(312e12, 19.5e12, 1.555e12),
    "h100": Compute(989e12, 67e12, 3.35e12),
    "h200": Compute(989e12, 67e12, 4.8e12),
    "gh200": Compute(989e12, 67e12, 4.0e12),
    "b200": Compute(2250e12, 75e12, 7.7e12),
    "rtx4090": Compute(165.2e12, 82.6e12, 1.008e12),
    "rtx5090": Compute(209.5e12, 104.8e12, 1.792e12),
    "mi300x": Compute(1307e12, 163.4e12, 5.3e12),
    "cpu": Compute(1e12, 1e12, 60e9),
}
COMPUTE |= {"g10": COMPUTE["a100"], "rtx4090-64": COMPUTE["rtx4090"], "h100-of-8": COMPUTE["h100"]}


def load_hardware(name_or_path: str | Path) -> Hardware:
    """A preset by name, or a TOML file with the fields of :class:`Hardware`.

    Raises ``HardwareError`` naming the file, the key and the remedy.
    """
    text = str(name_or_path)
    if text in PRESETS:
        return PRESETS[text]
    try:
        content = Path(text).read_bytes()
    except FileNotFoundError as error:
        raise HardwareError(
            f"--hardware {text}: no such file, and no preset of that name "
            f"(presets: {', '.join(PRESETS)})"
        ) from error
    except IsADirectoryError as error:
        raise HardwareError(f"--hardware {text}: a folder; name a TOML file in it") from error
    except OSError as error:
        raise HardwareError(f"--hardware {text}: cannot be read: {error.strerror}") from error
    return decode_hardware(content, text)


def load_compute(name_or_path: str | Path) -> Compute:
    """Of a preset, or of the table ``[compute]`` in a TOML file. Raises ``HardwareError``."""
    text = str(name_or_path)
    if text in COMPUTE:
        return COMPUTE[text]
    load_hardware(text)  # says what is wrong with the file
    found = tomllib.loads(Path(text).read_text()).get("compute")
    if not isinstance(found, dict):
        raise HardwareError(
            f"--hardware {text}: there is no table [compute] with flops_per_s, flops_32_per_s and "
            "memory_bytes_per_s of the device, which an estimate needs"
        )
    known = [item.name for item in fields(Compute)]
    for name in [*(n for n in found if n not in known), *(n for n in known[:3] if n not in found)]:
        what = "unknown" if name in found else "missing"
        raise HardwareError(f"--hardware {text}: compute.{name} is {what} ({', '.join(known)})")
    try:
        return Compute(**found)
    except HardwareError as error:
        raise HardwareError(f"--hardware {text}: {error}") from error


def decode_hardware(content: bytes, where: str) -> Hardware:
    """The machine in a TOML file's bytes; its table ``[compute]`` is for :func:`load_compute`.
    ``HardwareError`` names ``where`` and the reason."""
    if not content.strip():
        raise HardwareError(
            f'--hardware {where}: an empty file; it says at least device_bytes = "24GiB"'
        )
    try:
        document = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits is a ValueError
        raise HardwareError(f"--hardware {where}: not TOML ({error})") from error
    return from_mapping({k: v for k, v in document.items() if k != "compute"}, where)


MAX_TEXT = 80  # characters of a size


def from_mapping(content: dict[str, Any], where: str) -> Hardware:
    """From a TOML or JSON object, called ``where`` in errors. The size "inf" has no limit."""
    unknown = sorted(set(content) - set(_names()))
    if unknown:
        raise HardwareError(
            f"{where}: unknown key {shown(unknown[0])} (known: {', '.join(_names())})"
        )
    if "device_bytes" not in content:
        raise HardwareError(f"{where}: device_bytes is missing")
    values: dict[str, Any] = {}
    for name, value in content.items():
        try:
            values[name] = _number(name, value)
        except OverflowError as error:  # "9…9.5 GiB" with hundreds of digits
            raise HardwareError(f"{where}: {name} = {shown(value)} is too large") from error
        except (ValueError, TypeError) as error:
            if len(str(value)) > MAX_TEXT:
                raise HardwareError(f"{where}: {name} = {shown(value)} is no size") from error
            raise HardwareError(f"{where}: {error}") from error
    try:
        return Hardware(**values)
    except HardwareError as error:
        raise HardwareError(f"{where}: {error}") from error


def _number(name: str, value: Any) -> Any:
    if isinstance(value, str) and name != "transfer_latency_us":
        return math.inf if value.strip().lower() == "inf" else parse_bytes(value, name)
    return value


def to_mapping(hardware: Hardware) -> dict[str, Any]:
    """All fields as JSON holds them, for :func:`from_mapping`: no limit is the string "inf"."""
    return {name: "inf" if value == math.inf else value for name, value in asdict(hardware).items()}


def describe(hardware: Hardware) -> str:
    """One line for people."""
    tiers = (
        f"{tier} {'unlimited' if math.isinf(size) else format_bytes(size)}"
        for tier, size in (
            ("device", hardware.device_bytes),
            ("host", hardware.host_bytes),
            ("disk", hardware.disk_bytes),
        )
    )
    return (
        f"{', '.join(tiers)}; link {hardware.d2h_bytes_per_s / 1e9:g} out, "
        f"{hardware.h2d_bytes_per_s / 1e9:g} GB/s in; disk "
        f"{hardware.disk_write_bytes_per_s / 1e9:g} write, "
        f"{hardware.disk_read_bytes_per_s / 1e9:g} GB/s read; "
        f"pages of {format_bytes(hardware.page_size)}, latency {hardware.transfer_latency_us:g} µs"
    )
