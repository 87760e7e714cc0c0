"""The plugin of JAX: its processes and their coordinator. Pure.

``pkg/runtime/framework/plugins/jax/jax.go`` of kubeflow/trainer.
"""

from __future__ import annotations

from cache_runtimes.local.trainer.info import (
    COMPLETION_INDEX_FIELD,
    TRAINER_PORT,
    Info,
    Json,
    set_env,
    set_ports,
    variable,
)


def enforce(info: Info) -> None:
    """``Jax.EnforceMLPolicy``."""
    info.set_trainer_count()
    node = info.trainer_node()
    if info.trainer is None or node is None:
        return
    values: dict[str, str | Json] = {
        "JAX_NUM_PROCESSES": str(info.trainer_count()),
        "JAX_PROCESS_ID": COMPLETION_INDEX_FIELD,
        "JAX_COORDINATOR_ADDRESS": f"{info.first_host}:{TRAINER_PORT}",
    }
    set_env(node, map(variable, values, values.values()))
    set_ports(node, [{"containerPort": TRAINER_PORT}])
