"""Finds rank, world size and endpoint of this process, from arguments or the launcher.

A rank comes from the arguments, else from an initialised `torch.distributed`, JAX, torch_xla or
XGBoost, else from the first of `RANK_VARIABLES` that applies; else it is 0 of 1. The first one
wins, even if a later one differs.
So under torchrun the ``PET_*`` variables of the pod, which count nodes, have no effect. An
incomplete or impossible pair is an error and never skipped: two processes that both take rank 0
would silently train on the same rows.

An empty variable counts as absent. Numbers are parsed as torch parses them. Besides `__main__`,
this is the only module of this package that reads the environment. It opens no connection.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cache_protocol.errors import ConfigError, short
from cache_protocol.wire.credentials import Credentials, find_token

# The coordinator of the runtime `torch-distributed-data-cache`: pod 0 of the replicated job
# `dataset-initializer`, by the DNS name that JobSet gives it. There is no Service, because a
# training runtime only templates a JobSet. Runtimes with a cache elsewhere set CACHE_ENDPOINT.
TRAIN_JOB_ENDPOINT = "grpc://{job}-dataset-initializer-0-0.{job}:50051"

_ENDPOINT = re.compile(
    r"grpc(\+tcp|\+tls)?://(\[[0-9A-Fa-f:.%]+\]|[^\s/:@?#\[\]]+):(?P<port>[0-9]{1,5})/?"
)
_TRAIN_JOB_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")  # RFC 1035, as the CRD requires

_JOB_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
_UNNAMED = "unnamed"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_MOST_OF_ATTEMPT = 256
# What a launcher counts or numbers at each start. Steps of Slurm are independent programs.
_ATTEMPT_VARIABLES = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")

# SLURM_MAX_NORMAL_STEP_ID of slurm.h. Above it are batch scripts and the shells of salloc.
_LAST_STEP_OF_SRUN = 0xFFFFFFF0


@dataclass(frozen=True)
class Rank:
    """Rank ``rank`` of ``world_size``; ``0 <= rank < world_size``.

    Raises:
        ConfigError: the two do not fit together; quotes both.
    """

    rank: int
    world_size: int

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank must be in [0, world_size), got rank={self.rank} "
                f"world_size={self.world_size}"
            )


def _always(environ: Mapping[str, str]) -> bool:
    return True


def _is_one_process_a_node(environ: Mapping[str, str]) -> bool:
    """Whether each node has one process, so that its rank is that of the process.

    Unset means one, which is torchrun's default; "auto", "cpu" and "gpu" mean any number.

    Raises:
        ConfigError: a node has several processes, whose ranks only torchrun knows.
    """
    processes = environ.get("PET_NPROC_PER_NODE") or "1"
    if processes == "1":
        return True
    raise ConfigError(
        f"{_quoted(environ, 'PET_NPROC_PER_NODE', 'PET_NODE_RANK', 'PET_NNODES')} but neither RANK "
        f"nor WORLD_SIZE is set: with several processes a node, only torchrun knows the ranks. "
        f"Start the program with torchrun, set numProcPerNode: 1, or pass rank and world_size"
    )


def _is_task_of_srun(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process, rather than a batch script or an interactive shell.

    Those also have ``SLURM_NTASKS``, the requested number, and a batch script has
    ``SLURM_PROCID=0``. Only srun numbers a step (`setup_env` in Slurm's src/common/env.c); for
    the shell of salloc, the step number is above `_LAST_STEP_OF_SRUN`.
    """
    step = environ.get("SLURM_STEP_ID")
    if not step:
        return False
    try:
        return 0 <= int(step) <= _LAST_STEP_OF_SRUN
    except ValueError:
        raise ConfigError(f"SLURM_STEP_ID must be a number, got {step!r}") from None


def _is_counted_task_of_srun(environ: Mapping[str, str]) -> bool:
    return bool(environ.get("SLURM_STEP_NUM_TASKS")) and _is_task_of_srun(environ)


@dataclass(frozen=True)
class RankVariables:
    """The two variables in which a launcher puts rank and world size.

    Args:
        launcher: that sets them.
        rank, world_size: names of variables.
        applies: whether they are about this process if they are set; may raise ConfigError.
    """

    launcher: str
    rank: str
    world_size: str
    applies: Callable[[Mapping[str, str]], bool] = _always

    def find(self, environ: Mapping[str, str]) -> Rank | None:
        """The rank; None if the variables are not set or do not apply.

        Raises:
            ConfigError: one is missing or no number, or they do not fit; quotes both.
        """
        if not self.applies(environ):
            return None
        rank, world_size = environ.get(self.rank), environ.get(self.world_size)
        if not rank and not world_size:
            return None
        try:
            return Rank(int(rank or ""), int(world_size or ""))
        except ValueError:
            raise ConfigError(
                f"{self.rank} and {self.world_size}, which {self.launcher} sets, must be two "
                f"numbers with 0 <= {self.rank} < {self.world_size}, "
                f"got {_quoted(environ, self.rank, self.world_size)}"
            ) from None


RANK_VARIABLES = (
    RankVariables("torchrun", "RANK", "WORLD_SIZE"),
    RankVariables("Kubeflow Trainer", "PET_NODE_RANK", "PET_NNODES", _is_one_process_a_node),
    RankVariables("Kubeflow Trainer", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
    # Set by the Gloo launchers of Horovod; those with MPI have the variables of MPI.
    RankVariables("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE"),
    RankVariables("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    RankVariables("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE"),
    # `set_task_env` of Flux; the script of a `flux batch` has neither.
    RankVariables("flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    # Of the step; SLURM_NTASKS is the job's with `srun --preserve-env`.
    RankVariables("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", _is_counted_task_of_srun),
    RankVariables("srun", "SLURM_PROCID", "SLURM_NTASKS", _is_task_of_srun),
)


def find_rank(
    rank: int | None = None,
    world_size: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> Rank:
    """The rank of this process.

    Args:
        rank, world_size: both or neither.
        environ: default: the environment of this process.

    Raises:
        ConfigError: one of a pair is missing or no number, or they do not fit; quotes both.
    """
    if (rank is None) != (world_size is None):
        raise ConfigError(
            f"rank and world_size go together, got rank={rank} world_size={world_size}"
        )
    if rank is not None and world_size is not None:
        return Rank(rank, world_size)
    found = find_initialised_rank()
    if found is not None:
        return found.rank
    return find_rank_in(os.environ if environ is None else environ) or Rank(0, 1)


class InitialisedRank(NamedTuple):
    """The rank that a library of this process says.

    Attributes:
        library: its name, for messages.
        rank: of this process.
    """

    library: str
    rank: Rank


def find_initialised_rank() -> InitialisedRank | None:
    """What `torch.distributed`, JAX, torch_xla or XGBoost says; None while none is initialised.

    Imports none of them, and initialises nothing.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return InitialisedRank("torch.distributed", Rank(dist.get_rank(), dist.get_world_size()))
    # `jax.process_index` would initialise a backend, so this reads what it returns.
    jax = sys.modules.get("jax._src.distributed")
    state = getattr(jax, "global_state", None)
    if state is not None and state.client is not None:
        return InitialisedRank("jax.distributed", Rank(state.process_id, state.num_processes))
    # Devices are replicated in the processes that `torch_xla.launch` starts, and only there.
    xla, runtime = sys.modules.get("torch_xla"), sys.modules.get("torch_xla.runtime")
    if runtime is not None and xla is not None and xla._XLAC._xla_get_replication_devices_count():
        return InitialisedRank("torch_xla", Rank(runtime.global_ordinal(), runtime.world_size()))
    xgboost = sys.modules.get("xgboost.collective")
    if xgboost is not None and xgboost.is_distributed():
        rank = Rank(xgboost.get_rank(), xgboost.get_world_size())
        return InitialisedRank("xgboost.collective", rank)
    return None


def find_rank_in(environ: Mapping[str, str]) -> Rank | None:
    """The rank of the first of `RANK_VARIABLES` that applies; None if none does. Pure.

    Raises:
        ConfigError: its pair is incomplete or impossible, or only XGBoost's tracker knows the rank;
            quotes it.
    """
    found = (source.find(environ) for source in RANK_VARIABLES)
    rank = next((rank for rank in found if rank is not None), None)
    # DMLC_TASK_ID is no rank: the tracker numbers the workers, several of them in a pod with GPUs.
    if rank is None and environ.get("DMLC_NUM_WORKER", "1") not in ("", "1"):
        raise ConfigError(
            f"{_quoted(environ, 'DMLC_NUM_WORKER', 'DMLC_TASK_ID')} but XGBoost is not connected: "
            "make the dataset inside xgboost.collective.CommunicatorContext, or pass rank and "
            "world_size"
        )
    return rank


def find_job(job: str | None = None, environ: Mapping[str, str] | None = None) -> str:
    """The name of the job that this process belongs to.

    The argument, ``CACHE_JOB``, ``TRAIN_JOB_NAME``, torchrun's run id or Slurm's job number; else
    the address where ranks meet; else this machine and process.

    Raises:
        ConfigError: the first that is set is no name; quotes it.
    """
    values = os.environ if environ is None else environ
    run_id = values.get("TORCHELASTIC_RUN_ID")
    slurm = values.get("SLURM_JOB_ID")
    for name, value in (
        ("job", job),
        ("CACHE_JOB", values.get("CACHE_JOB") or None),
        ("TRAIN_JOB_NAME", values.get("TRAIN_JOB_NAME") or None),
        ("TORCHELASTIC_RUN_ID", None if run_id in (None, "", "none") else run_id),
        ("SLURM_JOB_ID", f"slurm-{slurm}" if slurm else None),
    ):
        if value is not None:
            if not isinstance(value, str) or not _JOB_NAME.fullmatch(value):
                raise ConfigError(
                    f"{name} must have 1 to 128 letters, digits and the characters ._:/- , "
                    f"got {value!r}"
                )
            return value
    host, port = values.get("MASTER_ADDR"), values.get("MASTER_PORT")
    if host in _LOOPBACK:  # of this machine: ranks of a job on another one do not meet here
        host = socket.gethostname()
    meets = f"{host}:{port}" if host and port else _own_name()
    return meets if _JOB_NAME.fullmatch(meets) else _UNNAMED


@dataclass(frozen=True)
class TrainingProcess:
    """The process that trains, and what its launcher says of it; workers have that of their parent.

    Attributes:
        name: random.
        rank, num_processes: as the launcher or a library numbers processes, which may differ from
            the ranks that divide the rows; 0 of 0: unknown.
        attempt: differs from one start by the launcher to the next; empty: unknown.
    """

    name: str
    host: str
    pid: int
    rank: int
    num_processes: int
    attempt: str


def find_process(
    job: str, *, in_worker: bool = False, environ: Mapping[str, str] | None = None
) -> TrainingProcess:
    """The training process that this one is, or works for.

    Args:
        job: its name. Processes that a batch script of Slurm starts without ranks are independent
            runs, if their name is only that of the script.
        in_worker: this is a DataLoader worker.
        environ: default: the environment of this process.
    """
    values = os.environ if environ is None else environ
    parent = multiprocessing.parent_process() if in_worker else None
    pid = os.getpid() if parent is None else parent.pid or 0
    host = socket.gethostname()
    # Random in each program, and the same in all processes that it starts.
    key = bytes(multiprocessing.current_process().authkey)
    name = hashlib.sha256(key + f"{host}:{pid}".encode()).hexdigest()[:16]
    try:
        found = find_initialised_rank()
        rank = find_rank_in(values) if found is None else found.rank
    except ConfigError:  # rank and world size are arguments
        rank = None
    counts = {variable: values.get(variable) for variable in _ATTEMPT_VARIABLES}
    attempt = " ".join(f"{variable}={value}" for variable, value in counts.items() if value)
    if rank is None and job == f"slurm-{values.get('SLURM_JOB_ID')}":
        attempt = name
    return TrainingProcess(
        name,
        host,
        pid,
        0 if rank is None else rank.rank,
        0 if rank is None else rank.world_size,
        attempt[:_MOST_OF_ATTEMPT],
    )


def is_of_one_process(job: str) -> bool:
    """Whether `find_job` found a name that other ranks of the job do not have."""
    return job in (_own_name(), _UNNAMED)


def _own_name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


def find_endpoint(endpoint: str | None, environ: Mapping[str, str] | None = None) -> str:
    """The Flight endpoint of the cache.

    The argument, else ``CACHE_ENDPOINT``, else `TRAIN_JOB_ENDPOINT` of ``TRAIN_JOB_NAME``.

    Raises:
        ConfigError: none is set, or the first that is set is no endpoint; quotes it.
    """
    values = os.environ if environ is None else environ
    for name, value in (
        ("endpoint", endpoint),
        ("CACHE_ENDPOINT", values.get("CACHE_ENDPOINT")),
    ):
        if value is not None and not (isinstance(value, str) and value == ""):
            return _checked_endpoint(name, value)
    if job := values.get("TRAIN_JOB_NAME"):
        if not _TRAIN_JOB_NAME.fullmatch(job):
            raise ConfigError(f"TRAIN_JOB_NAME must be the name of a TrainJob, got {job!r}")
        return TRAIN_JOB_ENDPOINT.format(job=job)
    raise ConfigError(
        "no endpoint: pass cache='grpc://HOST:PORT', set the environment variable "
        "CACHE_ENDPOINT, or run in a TrainJob whose runtime sets TRAIN_JOB_NAME"
    )


def find_ready_deadline_s(deadline_s: float, environ: Mapping[str, str] | None = None) -> float:
    """How long to wait for a cache that loads, in seconds.

    The longer of the argument and ``CACHE_READY_DEADLINE_S``, which a runtime sets where trainers
    start before the dataset is loaded.

    Raises:
        ConfigError: the variable is no number of seconds above 0; quotes it.
    """
    text = (os.environ if environ is None else environ).get("CACHE_READY_DEADLINE_S")
    if not text:
        return deadline_s
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise ConfigError(f"CACHE_READY_DEADLINE_S must be a number of seconds, got {text!r}")
    return max(deadline_s, found)


def find_view_options(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The options of the view for code that names none: ``CACHE_VIEW``, as JSON.

    Raises:
        ConfigError: the variable is no JSON object; quotes it.
    """
    text = (os.environ if environ is None else environ).get("CACHE_VIEW")
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(
            f"CACHE_VIEW must be the options of a View as JSON, such as "
            f'{{"where": "price > 100"}}, got {short(repr(text))}'
        )
    return found


def find_credentials(
    endpoint: str,
    token: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
    tls_ca: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Credentials:
    """What this process shows to the cache at ``endpoint``.

    A token is the argument, else that of a local cluster of this user at ``endpoint``, else
    ``CACHE_TOKEN`` or ``CACHE_TOKEN_FILE``. The files of TLS are the argument, else
    ``CACHE_TLS_CA``; ``CACHE_TLS_CERT`` and ``CACHE_TLS_KEY`` are those of this process.

    Raises:
        ConfigError: a file cannot be read, or two settings exclude each other.
    """
    check_credentials(token, token_file, tls_ca)
    found = Credentials.from_env(os.environ if environ is None else environ)
    given = token is not None or token_file is not None
    local = None if given else find_token(endpoint)
    if given or local is not None:
        file = None if token_file is None else os.fspath(token_file)
        found = replace(found, token=local if local is not None else token, token_file=file)
    return found if tls_ca is None else replace(found, tls_ca=os.fspath(tls_ca))


def check_credentials(token: object, token_file: object, tls_ca: object) -> None:
    """Raises ConfigError where an argument has a wrong type; reads no file."""
    for name, value in {"token_file": token_file, "tls_ca": tls_ca}.items():
        if not isinstance(value, str | os.PathLike | None) or value == "":
            raise ConfigError(f"{name} must be a path, got {value!r}")
    if token is not None and (not isinstance(token, str) or not token):
        raise ConfigError("token must be a string that is not empty")  # never quoted
    if token is not None and token_file is not None:
        raise ConfigError("token and token_file exclude each other: give one of them")


def check_endpoint(name: str, value: object) -> None:
    """Raises ConfigError where a value is no endpoint; None and "" stand for the default."""
    if value is not None and value != "":
        _checked_endpoint(name, value)


def _checked_endpoint(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be grpc://HOST:PORT, got {value!r}")
    found = _ENDPOINT.fullmatch(value)
    if not found or not value.isprintable() or not 1 <= int(found["port"]) <= 65535:
        raise ConfigError(f"{name} must be grpc://HOST:PORT, got {value!r}")
    return value


def _quoted(environ: Mapping[str, str], *names: str) -> str:
    """Each variable with its value, for errors."""
    return ", ".join(
        f"{name}={environ[name]!r}" if name in environ else f"{name} is not set" for name in names
    )
