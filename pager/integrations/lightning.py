"""``tensorpager.lightning``: a strategy for Lightning's ``Trainer``. ::

trainer = Trainer(strategy=tp.lightning.TensorPagerStrategy(device_budget="8GiB", …))

on_train_batch_start                                on_train_batch_end
     |  training_step, backward, clipping, step          |  checkpoints
     +----------------- one iteration -------------------+  validation_step: inference
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

try:
    from lightning.fabric.plugins import TorchCheckpointIO
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.strategies import SingleDeviceStrategy
except ImportError as error:
    if error.name is None or error.name.split(".")[0] != "lightning":
        raise
    raise ImportError(
        "tensorpager.lightning needs lightning: pip install 'tensorpager[lightning]'",
        name=error.name,
    ) from error

from ..api import Pager
from ..checkpoint.sources import TORCH_SUFFIXES
from ..devices.choice import resolve
from ..errors import PagerError

__all__ = ["TensorPagerStrategy"]


class TensorPagerStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """Train a ``LightningModule`` in pages, on one device.

    Args:
        pager: one that is open; or
        **arguments: of a new ``Pager``, which is made when the module is set up.

    Parameters, gradients, optimizer states and saved activations go into pages; optimizers and
    their schedulers, automatic and manual optimization, accumulation, clipping, mixed precision,
    validation, ``ModelCheckpoint`` and resuming work as ever. Each batch is one iteration of the
    pager, each batch of validation, test and prediction inference.

    Checkpoints are written straight from pages where they are local files with nothing but
    tensors and plain values, else by Lightning, which has all of them in memory. The module stays
    in pages after ``fit``: ``strategy.pager.close()`` when it is not needed any more.

    Raises ``PagerError`` for precisions whose kernels read weights by their addresses, before
    anything is paged.
    """

    strategy_name = "tensorpager"

    def __init__(self, pager: Pager | None = None, **arguments: Any) -> None:
        if pager is not None and arguments:
            raise TypeError(
                f"TensorPagerStrategy was given a pager and also {', '.join(arguments)}, which "
                "are for a new one; leave out one of the two"
            )
        device = resolve(arguments.get("device")) if pager is None else pager.device
        super().__init__(device=device)
        self._pager = pager
        self._arguments = {**arguments, "device": device}

    @property
    def pager(self) -> Pager:
        """That the module is paged by; made when it is first asked for."""
        if self._pager is None:
            self._pager = Pager(**self._arguments)
        return self._pager

    # -- setting up ------------------------------------------------------------------------------
    def setup(self, trainer: Any) -> None:
        self._refuse()
        if not any(isinstance(callback, _BatchEnd) for callback in trainer.callbacks):
            trainer.callbacks.insert(0, _BatchEnd(self))  # before what saves and looks on
        super().setup(trainer)

    def _refuse(self) -> None:
        name = type(self.precision_plugin).__name__
        if name in ("BitsandbytesPrecision", "TransformerEnginePrecision"):
            raise PagerError(
                f"{name} runs kernels that read weights through their addresses, which pages do "
                'not have; use precision="bf16-mixed" or "bf16-true"'
            )

    def model_to_device(self) -> None:
        """Its parameters become pages; buffers go to the device."""
        self.pager.page_module(self.model)
        super().model_to_device()

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            self.pager.optimizer(optimizer)

    # -- a step ----------------------------------------------------------------------------------
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._end(PagerError("the batch was skipped"))  # of one before, whose end never came
        self.pager.begin()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._end(exception)

    def on_train_end(self) -> None:
        self._end(PagerError("the training has ended"))
        super().on_train_end()

    def _end(self, error: BaseException | None) -> None:
        if self._pager is not None and self._pager.is_begun:
            self._pager.end(error)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.pager.inference():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.pager.inference():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.pager.inference():
            return super().predict_step(*args, **kwargs)

    # -- checkpoints, the end --------------------------------------------------------------------
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        path = Path(filepath)
        plain_io = type(self.checkpoint_io) is TorchCheckpointIO and storage_options is None
        if plain_io and "://" not in str(filepath) and path.suffix in TORCH_SUFFIXES:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self.pager.save(path, checkpoint)
            except TypeError:  # it holds objects that such a file has no place for
                pass
            else:
                return
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def teardown(self) -> None:
        """The module stays in pages, where Lightning would move it to the CPU."""
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()


class _BatchEnd(Callback):  # type: ignore[misc]
    """Strategies are not told of the end of a batch."""

    def __init__(self, strategy: TensorPagerStrategy) -> None:
        self._strategy = strategy

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self._strategy._end(None)
