"""What a dataset of ranks says of itself: what was asked and opened, for people and MLflow."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import pyarrow as pa

from cache_client.training.familiar import Familiar
from cache_client.training.job_config import JobConfig
from cache_client.training.opened import Opened
from cache_client.view_options.options import View
from cache_protocol.errors import ConfigError

if TYPE_CHECKING:
    from cache_client.training.mlflow_dataset import MlflowDataset


class Described(Familiar):
    """Base of `RankBatches`: facts of its configuration and its version."""

    _config: JobConfig
    _opened: Opened

    @abstractmethod
    def _sums(self) -> Mapping[str, int]:
        """Rows and bytes, as far as they are known."""

    @property
    def config(self) -> JobConfig:
        """What was asked."""
        return self._config

    @property
    def opened(self) -> Opened:
        """What is read now."""
        return self._opened

    @property
    def name(self) -> str:
        """Name of the dataset; of a mixture, those of its sources."""
        return self._config.name

    @property
    def endpoint(self) -> str:
        """Of the node that is asked first."""
        return self._config.access.endpoint

    @property
    def batch_size(self) -> int:
        """Rows of this rank in a full step."""
        return self._config.batch_size

    @property
    def rank(self) -> int:
        """Of this process."""
        return self._config.rank.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._config.rank.world_size

    @property
    def seed(self) -> int:
        """Of the order."""
        return self._config.shuffle.seed

    @property
    def view(self) -> View:
        """What is read other than each row once."""
        return self._config.view

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the version and the view; of a mixture, of its sources and their draw."""
        return self._opened.fingerprint

    @property
    def schema(self) -> pa.Schema:
        """Arrow schema of the columns that are read, before they become batches."""
        return self._opened.layout.logical

    @property
    def column_names(self) -> list[str]:
        """The columns of a batch, before ``transform``."""
        made = self._config.converter(self._opened.layout).names
        return self._opened.job_view.column_names(made, **self._config.added)

    def mlflow_dataset(self) -> MlflowDataset:
        """What this job reads, for ``mlflow.log_input``: version, view, schema, rows and bytes.

        Raises:
            ConfigError: MLflow is not installed.
        """
        try:
            from cache_client.training.mlflow_dataset import MlflowDataset
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "mlflow":
                raise
            raise ConfigError(
                "mlflow_dataset() needs the package 'mlflow': pip install mlflow-skinny"
            ) from None
        facts = {
            "cache": self.endpoint,
            "versions": [
                {"dataset": each.dataset, "fingerprint": each.fingerprint}
                for each in self._opened.versions
            ],
            "view": self._opened.view_text,
            "seed": self.seed,
            "shuffle": self._config.shuffle.shuffle,
            "shuffle_block_size": self._config.shuffle.shuffle_block_size,
        }
        return MlflowDataset(self.name, self.fingerprint, facts, self.schema, self._sums())
