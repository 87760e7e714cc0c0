"""Where bytes lie that are not on this machine: URIs -> objects -> their bytes.

`objects` knows what a URI means, the other modules how a store is spoken to. The only importers of
obstore and of what speaks to a store; no module here knows tables.
"""

from cache_server.object_stores.objects import (
    check_unused,
    download,
    expand,
    is_remote,
    read_tail,
    root_of,
)

__all__ = ["check_unused", "download", "expand", "is_remote", "read_tail", "root_of"]
