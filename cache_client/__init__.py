"""Read a cached table: `CacheIterableDataset` in a training loop, `CacheClient` to load it.

`CacheDataset` reads rows by number, for samplers and libraries that bring their own order.
"""

from cache_client.client import CacheClient, DatasetInfo, NodeInfo
from cache_client.dataset import CacheIterableDataset
from cache_client.errors import (
    CacheError,
    ConfigError,
    DatasetNotFoundError,
    InvalidRowsError,
    InvalidTicketError,
    LoadError,
    NodeUnavailableError,
    NotReadyError,
    RequestError,
    StaleVersionError,
)
from cache_client.random_access import CacheDataset
from protos.spec import DatasetSpec

__all__ = [
    "CacheClient",
    "CacheDataset",
    "CacheError",
    "CacheIterableDataset",
    "ConfigError",
    "DatasetInfo",
    "DatasetNotFoundError",
    "DatasetSpec",
    "InvalidRowsError",
    "InvalidTicketError",
    "LoadError",
    "NodeInfo",
    "NodeUnavailableError",
    "NotReadyError",
    "RequestError",
    "StaleVersionError",
]
