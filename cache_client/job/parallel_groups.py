"""Which rows a rank reads in a job that also divides the model: meshes and process groups.

Ranks of one tensor, pipeline or context parallel group work on the same rows. So the rows are
divided among the data parallel ranks only. Reads what torch says and makes no group.
"""

from __future__ import annotations

import gc
import math
import sys
import warnings
from typing import Any

from cache_client.job.ranks import Rank
from cache_protocol.errors import ConfigError

_DATA = {
    *("dp", "ddp", "fsdp", "hsdp", "data", "data_parallel", "batch"),
    *("dp_replicate", "dp_shard", "replicate", "shard"),
}
_MODEL = {
    *("tp", "tensor", "tensor_parallel", "pp", "pipe", "pipeline", "pipeline_parallel"),
    *("cp", "context", "context_parallel", "sp", "sequence", "sequence_parallel"),
    *("ulysses", "model", "model_parallel"),
}
# How Megatron describes its groups.
_MEGATRON = {
    "TENSOR_MODEL_PARALLEL_GROUP": "tensor",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pipeline",
    "CONTEXT_PARALLEL_GROUP": "context",
}


def data_parallel_rank(ranks: Any) -> Rank:
    """This process among the data parallel ranks of a mesh or a process group.

    Raises:
        ConfigError: as `rank_in_mesh` and `rank_in_group`.
    """
    return rank_in_mesh(ranks) if hasattr(ranks, "mesh_dim_names") else rank_in_group(ranks)


def rank_in_mesh(mesh: Any) -> Rank:
    """This process among the data parallel ranks of a `torch.distributed.DeviceMesh`.

    Args:
        mesh: of one dimension, which is taken as data parallel; or of several named ones, such as
            ``("dp_replicate", "dp_shard", "tp")``.

    Raises:
        ConfigError: it is no mesh, this process is not in it, or a dimension has no name that
            tells whether it divides the data.
    """
    names, shape = getattr(mesh, "mesh_dim_names", None), getattr(mesh, "shape", None)
    if shape is None or not hasattr(mesh, "get_coordinate"):
        raise ConfigError(f"data_parallel must be a DeviceMesh or a process group, got {mesh!r}")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ConfigError(f"data_parallel must be a mesh with this process in it, got {mesh!r}")
    if len(shape) == 1:
        return Rank(int(coordinate[0]), int(shape[0]))
    names = names or ("a dimension without a name",)
    unknown = [name for name in names if not _is_known(name)]
    if unknown:
        raise ConfigError(
            f"data_parallel has {', '.join(map(repr, unknown))}, which may divide the data or the "
            "model: pass the data parallel part of it, such as data_parallel=mesh['dp']"
        )
    rank = 0
    data = [index for index, name in enumerate(names) if name.lower() in _DATA]
    for index in data:
        rank = rank * int(shape[index]) + int(coordinate[index])
    return Rank(rank, math.prod(int(shape[index]) for index in data))


def rank_in_group(group: Any) -> Rank:
    """This process in a data parallel process group.

    Raises:
        ConfigError: it is no group, or this process is not in it.
    """
    import torch.distributed as dist

    try:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ConfigError(
            f"data_parallel must be a DeviceMesh or a process group: {error}"
        ) from None
    if rank < 0:
        raise ConfigError("data_parallel must be a process group that this process is in")
    return Rank(rank, size)


def model_parallel_dimensions() -> list[str]:
    """The dimensions over which this process divides a model with others, sorted.

    Found by the descriptions of process groups, such as Megatron's or ``mesh_tp``. A mesh whose
    dimension spans all ranks makes no group. Such a mesh is found among all objects of the
    process, which takes about 0.1 s.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return []
    found = set()
    for group in list(dist.distributed_c10d._world.pg_map):
        about = str(getattr(group, "group_desc", ""))
        name = _MEGATRON.get(about, about.removeprefix("mesh_"))
        if name.lower() in _MODEL and group.size() > 1:
            found.add(name)
    if not found and dist.get_world_size() > 1:
        mesh_type = getattr(sys.modules.get("torch.distributed.device_mesh"), "DeviceMesh", None)
        for mesh in (thing for thing in gc.get_objects() if type(thing) is mesh_type):
            named = zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)
            found.update(name for name, size in named if name.lower() in _MODEL and size > 1)
    return sorted(found)


def warn_of_model_parallelism(dataset: str, world_size: int) -> bool:
    """Warns if ranks that work on the same rows read different ones; returns whether it did."""
    dimensions = model_parallel_dimensions()
    if dimensions:
        warnings.warn(
            f"this job divides the model ({', '.join(dimensions)}), and {dataset!r} gives each of "
            f"its {world_size} ranks other rows: pass data_parallel=, a mesh or the "
            "data parallel group, or rank= and world_size= if that is meant",
            stacklevel=5,
        )
    return bool(dimensions)


def _is_known(name: str) -> bool:
    return name.lower() in _DATA | _MODEL
