"""Runs a TrainJob with its runtime on one machine, for development.

    manifests   YAML -> TrainJob, runtime, Secrets          reads files
    render      TrainJob + runtime -> JobSet                pure, as Trainer 2.3 does it
    supported   the fields of a JobSet that can run here    pure
    pods        JobSet -> pods -> processes                 pure
    policies    exit code -> restart, replace, fail         pure
    ssh         the files of ssh and sshd, for MPI
    containers  a process and all that it starts
    kubelet     one pod
    controller  Jobs and the JobSet
    run         all of it

One asyncio event loop runs everything. Cancelling the task of a job stops its pods to their end,
however often it is cancelled.
"""

from cache_runtimes.local.controller import Console
from cache_runtimes.local.manifests import Manifests, read_manifests
from cache_runtimes.local.render import render
from cache_runtimes.local.run import run_local

__all__ = ["Console", "Manifests", "read_manifests", "render", "run_local"]
