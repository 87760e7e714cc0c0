"""Trainers of frameworks that note the rows they train on. Slow to import: do it inside a test."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
import transformers
from lightning import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from cache_client import CacheIterableDataset


class LightningLoader:
    """A loader whose state Lightning keeps, and whose `sampler` it tells the epoch."""

    def __init__(self, dataset: CacheIterableDataset, *, tells_epochs: bool) -> None:
        self._dataset = dataset
        if tells_epochs:
            self.sampler = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataset)

    def state_dict(self) -> dict[str, Any]:
        return self._dataset.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._dataset.load_state_dict(state)


class _SeesRows(LightningModule):
    def __init__(self, dataset: CacheIterableDataset, seen: list[list[int]]) -> None:
        super().__init__()
        self.layer, self._dataset, self._seen = torch.nn.Linear(1, 1), dataset, seen

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_epoch_start(self) -> None:
        self._dataset.set_epoch(self.current_epoch)

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        self._seen[self.current_epoch] += batch["row"].tolist()
        loss: torch.Tensor = self.layer(batch["row"].float()[:, None]).sum() * 0
        return loss


def fit_with_lightning(
    dataset: CacheIterableDataset,
    loader: Any,
    seen: list[list[int]],
    directory: Path,
    *,
    limit: int | float,
    stop: int | None,
) -> None:
    """Fits to the end from what was saved, or from the start until ``stop``, and saves there."""
    saving = ModelCheckpoint(directory, "latest", every_n_train_steps=stop or 1_000)
    trainer = lightning.Trainer(
        max_epochs=len(seen), max_steps=stop or -1, limit_train_batches=limit, callbacks=saving,
        use_distributed_sampler=False, accelerator="cpu", devices=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    resumed = None if stop else directory / "latest.ckpt"
    trainer.fit(_SeesRows(dataset, seen), loader, ckpt_path=resumed)


class _NotingTrainer(transformers.Trainer):
    """Trains on the dataset's own batches; where it resumes, it skips those it has trained on."""

    def __init__(self, dataset: Any, workers: int, seen: list[int], **options: Any) -> None:
        super().__init__(torch.nn.Linear(1, 1), train_dataset=dataset, **options)
        self._loader = DataLoader(dataset, batch_size=None, num_workers=workers)
        self._seen = seen

    def get_train_dataloader(self) -> DataLoader[Any]:
        return self._loader

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], *_: Any, **__: Any) -> Any:
        self._seen += inputs["row"].tolist()
        return model(inputs["row"].float()[:, None]).sum() * 0


class _StopsAndTells(transformers.TrainerCallback):
    def __init__(self, dataset: CacheIterableDataset, stop: int | None, tells: bool) -> None:
        self._dataset, self._stop, self._tells = dataset, stop, tells

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._tells:
            self._dataset.set_epoch(math.floor(round(state.epoch or 0, 4)))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._stop:
            control.should_save = control.should_training_stop = True


def train_with_transformers(
    dataset: CacheIterableDataset,
    workers: int,
    seen: list[int],
    directory: Path,
    epochs: int,
    *,
    stop: int | None = None,
    resume: int | None = None,
    tells: bool = True,
) -> None:
    """Trains from the start or from step ``resume``, to the end or to step ``stop``."""
    options = transformers.TrainingArguments(
        output_dir=str(directory), num_train_epochs=epochs, use_cpu=True, report_to="none",
        save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    callbacks = [_StopsAndTells(dataset, stop, tells)]
    trainer = _NotingTrainer(dataset, workers, seen, args=options, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=f"{directory}/checkpoint-{resume}" if resume else None)
