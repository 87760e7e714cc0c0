"""What both commands show in the same way: sizes, loads, output, ``--version``."""
