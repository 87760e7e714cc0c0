"""Output that both commands share: sizes, loads, ``--version``."""
