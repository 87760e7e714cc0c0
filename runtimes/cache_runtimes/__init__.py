"""Training runtimes for Kubeflow TrainJobs with a cache, and their programs.

`MANIFESTS` is the folder of the runtimes, one object a file, for kustomize.
`cache_runtimes.initializer` creates a cache of the size that its job asks for, and
`cache_runtimes.local` runs a TrainJob and its runtime as processes of one machine.
"""

from pathlib import Path

_IN_WHEEL = Path(__file__).parent / "manifests"
MANIFESTS = _IN_WHEEL if _IN_WHEEL.is_dir() else Path(__file__).parents[1]

__all__ = ["MANIFESTS"]
