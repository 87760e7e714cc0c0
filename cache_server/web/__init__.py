"""The HTTP port of a node: its status page, its metrics and its readiness."""
