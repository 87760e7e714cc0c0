"""Tables and queries of a PostgreSQL server. Only this folder imports its driver."""

from cache_server.tables.postgres.snapshot import pin, read

__all__ = ["pin", "read"]
