"""Orders that readers announce: rows laid out on a scratch disk as they will be asked for."""
