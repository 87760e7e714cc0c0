"""Cache nodes: load tables once with DataFusion, serve random rows over Arrow Flight.

`LocalCluster` runs nodes on this machine; ``cache-server serve`` runs one node.
"""

from importlib.metadata import version
from typing import TYPE_CHECKING

from cache_server.local import LocalCluster, LocalNode

__all__ = ["LocalCluster", "LocalNode"]

if TYPE_CHECKING:
    __version__: str


def __getattr__(name: str) -> object:
    if name == "__version__":
        return version("trainer-data-cache")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
