"""What TensorBoard shows of a run, a point for each step."""

from pathlib import Path
from typing import Any

from .options import UsageError


class Scalars:
    """Writes to ``folder``, which is made; does nothing if it is ``None``."""

    def __init__(self, folder: Path | None) -> None:
        """Raises ``UsageError`` where TensorBoard is not installed or the folder cannot be made."""
        self._writer: Any = None
        self._before = {"stall_us": 0.0, "moved": 0}
        if folder is None:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError(
                f"--tensorboard={folder} needs the tensorboard package ({error}); "
                "pip install tensorboard"
            ) from error
        try:
            self._writer = SummaryWriter(folder)  # type: ignore[no-untyped-call]
        except OSError as error:
            raise UsageError(f"--tensorboard={folder}: {error.strerror}") from error

    def step(
        self,
        step: int,
        loss: float,
        tokens_per_s: float,
        seconds: float,
        stats: dict[str, Any] | None,
    ) -> None:
        """Step number ``step`` (from 0) took ``seconds``; ``stats`` of the pager after it, if there
        is one. Counters become what this step added to them."""
        if self._writer is None:
            return
        values = {"train/loss": loss, "train/tokens_per_s": tokens_per_s}
        if stats is not None:
            now = {
                "stall_us": stats["stall_us"],
                "moved": stats["bytes_out"] + stats["bytes_in"],
            }
            added = {name: now[name] - before for name, before in self._before.items()}
            self._before = now
            for tier, nbytes in stats["used_bytes"].items():
                values[f"memory/{tier}_bytes"] = nbytes
            values["memory/device_peak_bytes"] = stats["peak_bytes"]["device"]
            values["paging/stall_share"] = min(1.0, added["stall_us"] / 1e6 / seconds)
            values["paging/bytes_moved"] = added["moved"]
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def __enter__(self) -> "Scalars":
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()
