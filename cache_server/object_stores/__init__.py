"""Reads bytes of other machines: URIs -> objects -> their bytes.

`objects` knows what a URI means. The other modules know how to talk to a store, and only they
import obstore and other store libraries. No module here knows tables.
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
