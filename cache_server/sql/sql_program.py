"""A program that runs `sql_worker`, without a node and without pandas: see `sql_process`."""

from __future__ import annotations

import importlib
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType


class _WithoutPandas(MetaPathFinder):
    """Pretends that pandas is not installed: pyarrow would import it, for half a second."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)


if __name__ == "__main__":
    sys.meta_path.insert(0, _WithoutPandas())
    package = ModuleType("cache_server")  # without its `__init__`, which imports a whole node
    package.__path__ = [str(Path(__file__).parents[1])]
    sys.modules["cache_server"] = package
    importlib.import_module("cache_server.sql.sql_worker").main()
