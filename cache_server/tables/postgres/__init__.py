"""Tables and queries of a PostgreSQL server: the only importer of its driver."""

from cache_server.tables.postgres.snapshot import pin, read

__all__ = ["pin", "read"]
