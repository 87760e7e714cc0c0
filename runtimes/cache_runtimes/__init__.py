"""What a cluster needs to run a cache beside the trainers of a Kubeflow TrainJob.

`MANIFESTS` is the folder of the runtimes, one object a file, to be applied with kustomize. The
programs that belong to them are here: `cache_runtimes.initializer` makes a cache sized by its job,
and `cache_runtimes.local` runs a TrainJob and its runtime as processes of one machine.
"""

from pathlib import Path

_IN_WHEEL = Path(__file__).parent / "manifests"
MANIFESTS = _IN_WHEEL if _IN_WHEEL.is_dir() else Path(__file__).parents[1]

__all__ = ["MANIFESTS"]
