"""`TrainsFromCache` with a stand-in for the Trainer of Transformers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cache_client import CacheClient, CacheIterableDataset, ConfigError, DatasetSpec
from cache_client.training import transformers_trainer
from cache_server import LocalCluster
from tests.conftest import write_numbered

ROWS = 40


class Trainer:
    """What `TrainsFromCache` uses of the Trainer of Transformers."""

    def __init__(self, folder: Path, dataset: Any, accumulation: int = 1) -> None:
        self.train_dataset, self.eval_dataset = dataset, {"other": dataset}
        self.args = SimpleNamespace(
            output_dir=str(folder),
            dataloader_num_workers=0,
            dataloader_pin_memory=True,
            gradient_accumulation_steps=accumulation,
            should_save=True,
            ignore_data_skip=False,
        )
        self.state = SimpleNamespace(global_step=0)

    def train(self, resume_from_checkpoint: object = None, **options: Any) -> object:
        return resume_from_checkpoint, options

    def _get_output_dir(self, trial: object) -> str:
        assert trial is None
        return str(self.args.output_dir)

    def _save_checkpoint(self, model: object, trial: object) -> None:
        Path(self.args.output_dir, f"checkpoint-{self.state.global_step}").mkdir(parents=True)


class CacheTrainer(transformers_trainer.TrainsFromCache, Trainer):
    pass


@pytest.fixture
def source(tmp_path: Path, client: CacheClient, dataset_name: str) -> str:
    client.load(DatasetSpec(dataset_name, write_numbered(tmp_path / "rows", ROWS)))
    return dataset_name


def dataset(cluster: LocalCluster, name: str, rank: int, ranks: int) -> CacheIterableDataset:
    return CacheIterableDataset(
        name,
        cache=cluster.endpoint,
        batch_size=8 // ranks,
        columns=["row"],
        shuffle=True,
        rank=rank,
        world_size=ranks,
    )


def rows(batches: Any) -> list[int]:
    return [row for batch in batches for row in batch["row"].tolist()]


def test_a_checkpoint_resumes_with_half_of_the_ranks_and_twice_the_accumulation(
    cluster: LocalCluster, source: str, tmp_path: Path
) -> None:
    seen = []
    for rank in (1, 0):
        trainer = CacheTrainer(tmp_path, dataset(cluster, source, rank, 2))
        assert trainer.train() == (None, {}) and trainer.args.ignore_data_skip
        batches = iter(trainer.get_train_dataloader())
        seen += rows(next(batches) for _ in range(2))
    trainer.state.global_step = 2
    trainer._save_checkpoint(None, None)
    checkpoint = str(tmp_path / "checkpoint-2")

    alone = CacheTrainer(tmp_path, dataset(cluster, source, 0, 1))
    assert alone.train(checkpoint, trial=None) == (checkpoint, {"trial": None})
    seen += rows(alone.get_train_dataloader())
    assert sorted(seen) == list(range(ROWS))
    alone.train_dataset.set_epoch(1)
    assert sorted(rows(alone.get_eval_dataloader("other"))) == list(range(ROWS))
    assert alone.num_examples(alone.get_eval_dataloader(alone.train_dataset)) == ROWS

    other = CacheTrainer(tmp_path, dataset(cluster, source, 0, 1), accumulation=2)
    with pytest.raises(ConfigError, match=r"has steps of 8 rows, and this run of 16: the trainer"):
        other.train(checkpoint)


def test_what_cannot_be_resumed_is_named(
    cluster: LocalCluster, source: str, tmp_path: Path
) -> None:
    trainer = CacheTrainer(tmp_path, dataset(cluster, source, 0, 1))
    with pytest.raises(ConfigError, match=r"checkpoint-9' has no position of a dataset in cache_p"):
        trainer.train(str(tmp_path / "checkpoint-9"))
    trainer.train_dataset = [1]
    with pytest.raises(ConfigError, match="or a CacheMixture as train_dataset, got list"):
        trainer.get_train_dataloader()
