"""`TrainsFromCache`: what makes a `Trainer` of Transformers, or of TRL, train from a cache.

It gives the trainer the loader of its dataset, and keeps the position of the dataset in its
checkpoints. It imports neither library: the class that it is mixed into has them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from cache_client.training.base import RankBatches
from cache_protocol.errors import ConfigError

POSITION_FILE: Final = "cache_position.json"


class TrainsFromCache:
    """Makes a subclass of Transformers' `Trainer`, such as TRL's `SFTTrainer`, train from a cache.

    Name it first: ``class CacheSFTTrainer(TrainsFromCache, SFTTrainer): pass``.

    Its ``train_dataset`` is a `CacheIterableDataset` or `CacheMixture`, whose batches are what the
    model takes. The trainer neither collates nor divides them, and TRL's do not tokenise. An
    ``eval_dataset`` may be one, too, or what the trainer takes else.

    A checkpoint has the position of the dataset, too. ``train(resume_from_checkpoint=...)``
    continues with the next row, also in the midst of an epoch, and with another number of ranks or
    gradient accumulation. The trainer counts steps. So a step must have as many rows as before:
    give half of the ranks twice the ``batch_size``.

    Raises:
        ConfigError: a checkpoint has no position, or was made with steps of another size.
    """

    args: Any
    train_dataset: Any
    eval_dataset: Any

    def __init__(self, *arguments: Any, **options: Any) -> None:
        given = {name: options.get(name) for name in ("train_dataset", "eval_dataset")}
        self._stand_ins: list[Any] = []
        if hasattr(super(), "_prepare_dataset"):  # TRL's take none but those of `datasets`
            options |= {name: self._stand_in(each) for name, each in given.items()}
        super().__init__(*arguments, **options)
        for name, each in given.items():
            if each is not None:
                setattr(self, name, each)

    def get_train_dataloader(self) -> Any:
        """The loader of ``train_dataset``."""
        if not isinstance(self.train_dataset, RankBatches):
            raise ConfigError(
                "TrainsFromCache needs a CacheIterableDataset or a CacheMixture as train_dataset, "
                f"got {type(self.train_dataset).__name__}"
            )
        return self._loader(self.train_dataset)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The loader of a dataset, or of the ``eval_dataset`` of this name; default: the only."""
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        found = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(found, RankBatches):
            return self._loader(found)
        return super().get_eval_dataloader(found)  # type: ignore[misc]

    def num_examples(self, dataloader: Any) -> int:
        """Samples of an epoch, over all ranks."""
        dataset = dataloader.dataset
        return int(dataset.num_samples if isinstance(dataset, RankBatches) else len(dataset))

    def train(self, resume_from_checkpoint: str | bool | None = None, **options: Any) -> Any:
        """As that of the trainer; a checkpoint also has the position of the dataset."""
        if resume_from_checkpoint is True:
            from transformers.trainer_utils import get_last_checkpoint

            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
        if isinstance(resume_from_checkpoint, str):
            self._resume(Path(resume_from_checkpoint))
        self.args.ignore_data_skip = True  # the dataset is there already
        return super().train(resume_from_checkpoint, **options)  # type: ignore[misc]

    def _stand_in(self, dataset: Any) -> Any:
        """A dataset of `datasets` whose only row has the names of a batch."""
        if isinstance(dataset, Mapping):
            return {name: self._stand_in(each) for name, each in dataset.items()}
        if not isinstance(dataset, RankBatches):
            return dataset
        from datasets import Dataset

        self._stand_ins.append(Dataset.from_dict({name: [0] for name in dataset.take(1)[0]}))
        return self._stand_ins[-1]

    def _prepare_dataset(self, dataset: Any, *arguments: Any, **options: Any) -> Any:
        """What TRL's trainers map over a dataset, the nodes and the view have done."""
        if any(dataset is each for each in self._stand_ins):
            return dataset
        return super()._prepare_dataset(dataset, *arguments, **options)  # type: ignore[misc]

    def _loader(self, dataset: RankBatches) -> Any:
        workers = self.args.dataloader_num_workers
        return dataset.loader(
            num_workers=workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
            prefetch_factor=self.args.dataloader_prefetch_factor if workers else None,
            persistent_workers=bool(workers and self.args.dataloader_persistent_workers),
        )

    def _rows_per_step(self) -> int:
        """Samples of all ranks between two updates of the model."""
        dataset, repeats = self.train_dataset, self.args.gradient_accumulation_steps
        return int(dataset.batch_size * dataset.world_size * repeats)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)  # type: ignore[misc]
        if self.args.should_save:
            step = self.state.global_step  # type: ignore[attr-defined]
            folder = self._get_output_dir(trial)  # type: ignore[attr-defined]
            position = {
                "rows_per_step": self._rows_per_step(),
                "state": self.train_dataset.state_dict(),  # the same on every rank
            }
            path = Path(folder, f"checkpoint-{step}", POSITION_FILE)
            path.write_text(json.dumps(position), encoding="utf-8")

    def _resume(self, checkpoint: Path) -> None:
        try:
            position = json.loads((checkpoint / POSITION_FILE).read_text(encoding="utf-8"))
            before, state = position["rows_per_step"], position["state"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"checkpoint {str(checkpoint)!r} has no position of a dataset in {POSITION_FILE} "
                f"({error}): resume from one that a trainer with TrainsFromCache has saved whole"
            ) from None
        if before != self._rows_per_step():
            raise ConfigError(
                f"checkpoint {str(checkpoint)!r} has steps of {before} rows, and this run of "
                f"{self._rows_per_step()}: the trainer counts steps, so change batch_size or "
                "gradient_accumulation_steps with the number of ranks"
            )
        self.train_dataset.load_state_dict(state)
