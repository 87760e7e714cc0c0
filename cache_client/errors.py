"""The errors a user of the client meets. The tree is drawn in `protos.errors`."""

from protos.errors import (
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

__all__ = [
    "CacheError",
    "ConfigError",
    "DatasetNotFoundError",
    "InvalidRowsError",
    "InvalidTicketError",
    "LoadError",
    "NodeUnavailableError",
    "NotReadyError",
    "RequestError",
    "StaleVersionError",
]
