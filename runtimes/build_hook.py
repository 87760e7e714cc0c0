"""A hook of hatchling for the manifests of `runtimes/`, which its settings cannot describe.

In a checkout the folder has both: manifests for kustomize, and the package `cache_runtimes`. In a
wheel the manifests are data of the package. The Helm chart has links to folders of manifests.
Hatchling visits each folder once, so it would leave out the links or what they lead to.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Manifests(BuildHookInterface[Any]):
    """Adds the manifests, except where the checkout itself is installed."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Names files, and their places in the distribution."""
        if version == "editable":
            return
        root = Path(self.root)
        places = build_data["force_include"]
        if self.target_name == "sdist":
            for path in _files(root / "runtimes" / "chart" / "manifests"):
                places[str(path)] = path.relative_to(root).as_posix()
        else:
            for path in _files(root / "runtimes"):
                if path.suffix == ".yaml":
                    within = path.relative_to(root / "runtimes").as_posix()
                    places[str(path)] = f"cache_runtimes/manifests/{within}"


def _files(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder, followlinks=True):
        yield from (Path(parent, name) for name in names)
