"""Functions that SQL may call on nodes: what a package declares, and those of this package.

A package registers a `Function` as an entry point of the group `trainer_data_cache.functions`. The
rooms of `sql` find the calls and run them in processes apart.
"""

from cache_server.functions.declared import Column, Function, Option

__all__ = ["Column", "Function", "Option"]
