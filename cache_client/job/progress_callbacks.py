"""`report_progress` as callbacks of training frameworks, which are imported at their first use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cache_client.job.progress import report_progress


def transformers_progress() -> Any:
    """A ``TrainerCallback`` of transformers that reports steps, and the numbers that it logs."""
    from transformers import TrainerCallback

    class Progress(TrainerCallback):  # type: ignore[misc]  # no types
        """Reports at each step and at the end."""

        def __init__(self) -> None:
            self._metrics: dict[str, float | str] = {}

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            """Keeps the newest numbers."""
            self._metrics |= numbers(logs or {})

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Reports how far it is."""
            if state.max_steps > 0:
                report_progress(state.global_step, state.max_steps, self._metrics)

    return Progress()


def lightning_progress() -> Any:
    """A ``Callback`` of Lightning that reports steps, and the numbers that the module logs."""
    from lightning.pytorch import Callback

    class Progress(Callback):  # type: ignore[misc]  # no types
        """Reports at each batch."""

        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            """Reports how far it is; of a training without an end, nothing."""
            total = float(trainer.estimated_stepping_batches)
            if 0 < total < float("inf"):
                report_progress(trainer.global_step, total, numbers(trainer.callback_metrics))

    return Progress()


def numbers(logged: Mapping[str, Any]) -> dict[str, float | str]:
    """Those of the logged values that are numbers; tensors of one value are."""
    found: dict[str, float | str] = {}
    for name, value in logged.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            continue
    return found
