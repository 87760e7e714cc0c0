"""Client of the trainer data cache.

    CacheClient              loads, lists and drops datasets
    CacheIterableDataset     reads a dataset in a training loop
    CacheMixture             reads several datasets in given proportions
    CacheDataset             reads rows by number, for samplers and libraries with their own order
    Connection               how to reach a cache; what to read of a dataset is a View

The datasets and the loader need torch. They are imported at their first use: `CacheClient` and
``cachectl`` work without torch.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

from cache_client.control.client import CacheClient
from cache_client.control.forecast import LoadForecast, TableForecast
from cache_client.control.infos import (
    DatasetInfo,
    DrainInfo,
    FunctionInfo,
    NodeInfo,
    OrphanInfo,
    ShareInfo,
)
from cache_client.epochs.stats import NodeStats, ReadStats
from cache_client.job.connection import Connection
from cache_client.writing.writes import Write
from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.errors import (
    CacheError,
    ConfigError,
    DatasetNotFoundError,
    InvalidImageError,
    InvalidRowsError,
    InvalidTextError,
    InvalidTicketError,
    LengthUnknownError,
    LoadError,
    LostPartitionsError,
    NodeUnavailableError,
    NotReadyError,
    PermissionDeniedError,
    RanksDisagreeError,
    RequestError,
    SchemaError,
    StaleVersionError,
    TransientLoadError,
    UnauthenticatedError,
    missing_package,
)
from cache_protocol.wire.load_progress import LoadReport

if TYPE_CHECKING:
    __version__: str
    from cache_client.job.progress import report_progress
    from cache_client.job.progress_callbacks import lightning_progress, transformers_progress
    from cache_client.training.dataset import CacheIterableDataset
    from cache_client.training.job_config import Reading
    from cache_client.training.loader import CacheLoader
    from cache_client.training.mixture import CacheMixture
    from cache_client.training.random_access import CacheDataset
    from cache_client.training.transformers_trainer import TrainsFromCache
    from cache_client.view_options.lookups import Frequent, Join, Vocabulary
    from cache_client.view_options.options import View

_AT_FIRST_USE = {
    "CacheDataset": "training.random_access",
    "CacheIterableDataset": "training.dataset",
    "CacheLoader": "training.loader",
    "CacheMixture": "training.mixture",
    "Frequent": "view_options.lookups",
    "Join": "view_options.lookups",
    "Reading": "training.job_config",
    "View": "view_options.options",
    "lightning_progress": "job.progress_callbacks",
    "report_progress": "job.progress",
    "TrainsFromCache": "training.transformers_trainer",
    "transformers_progress": "job.progress_callbacks",
    "Vocabulary": "view_options.lookups",
}

__all__ = [
    "CacheClient",
    "CacheDataset",
    "CacheError",
    "CacheIterableDataset",
    "CacheLoader",
    "CacheMixture",
    "ConfigError",
    "Connection",
    "DatasetInfo",
    "DatasetNotFoundError",
    "DatasetSpec",
    "DrainInfo",
    "Frequent",
    "FunctionInfo",
    "InvalidImageError",
    "InvalidRowsError",
    "InvalidTextError",
    "InvalidTicketError",
    "Join",
    "LengthUnknownError",
    "LoadError",
    "LoadForecast",
    "LoadReport",
    "LostPartitionsError",
    "NodeInfo",
    "NodeStats",
    "NodeUnavailableError",
    "NotReadyError",
    "OrphanInfo",
    "PermissionDeniedError",
    "RanksDisagreeError",
    "ReadStats",
    "Reading",
    "RequestError",
    "SchemaError",
    "ShareInfo",
    "StaleVersionError",
    "TableForecast",
    "TrainsFromCache",
    "TransientLoadError",
    "UnauthenticatedError",
    "View",
    "Vocabulary",
    "Write",
    "lightning_progress",
    "report_progress",
    "transformers_progress",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return version("trainer-data-cache")
    if name not in _AT_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"{__name__}.{_AT_FIRST_USE[name]}")
    except ModuleNotFoundError as error:
        raise ConfigError(missing_package(error, name, "client")) from None
    return getattr(module, name)


def __dir__() -> list[str]:
    return __all__
