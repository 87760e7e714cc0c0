"""Cache nodes: load tables once with DataFusion, serve random rows over Arrow Flight.

`LocalCluster` runs nodes on this machine; ``cache-server serve`` runs one node.
"""

from cache_server.local import LocalCluster, LocalNode

__all__ = ["LocalCluster", "LocalNode"]
