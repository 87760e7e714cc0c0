"""What a cluster needs to run a cache beside the trainers of a Kubeflow TrainJob.

The manifests lie in this folder, one object a file, to be applied with kustomize. Beside them are
the few programs that belong to them: `runtimes.initializer`, which makes a cache sized by its job,
and `runtimes.local`, which runs a TrainJob and its runtime as processes of one machine.
"""

from pathlib import Path

MANIFESTS = Path(__file__).parent

__all__ = ["MANIFESTS"]
