"""Runs a TrainJob with its runtime on one machine, for development.

    documents  YAML -> TrainJob, runtime, Secrets         reads files
    render     TrainJob + runtime -> JobSet               pure, as Trainer 2.3 does it
    patches    strategic merge of runtimePatches          pure
    pods       JobSet -> pods -> processes                pure
    policies   exit code -> restart, replace, fail        pure
    handlers   which probes and hooks it can run          pure
    volumes    emptyDir, Secrets, ConfigMaps as folders
    containers a process and all that it starts
    probes     gRPC, TCP, HTTP, command
    kubelet    one pod
    controller Jobs and the JobSet
    run        all of it

Everything that runs does so in one asyncio event loop: stopping a job is cancelling a task, which
stops its pods on the way out, to their end, however often it is cancelled.
"""

from cache_runtimes.local.controller import Console
from cache_runtimes.local.documents import Manifests, read_manifests
from cache_runtimes.local.render import render
from cache_runtimes.local.run import run_local

__all__ = ["Console", "Manifests", "read_manifests", "render", "run_local"]
