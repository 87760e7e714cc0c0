"""The plugin of XGBoost: its workers and their tracker. Pure.

``pkg/runtime/framework/plugins/xgboost/xgboost.go`` of kubeflow/trainer.
"""

from __future__ import annotations

from collections.abc import Iterator

from cache_runtimes.local.trainer.info import (
    COMPLETION_INDEX_FIELD,
    TRAINER_PORT,
    Info,
    Json,
    given_variables,
    gpus,
    set_env,
    set_ports,
    variable,
)
from cache_runtimes.local.trainer.refusals import Refusal, by_trainer

_VARIABLES = ("DMLC_TRACKER_URI", "DMLC_TRACKER_PORT", "DMLC_TASK_ID", "DMLC_NUM_WORKER")


def problems(info: Info) -> Iterator[Refusal]:
    """``XGBoost.Validate``."""
    for index, item in enumerate((info.trainer or {}).get("env") or ()):
        if item["name"] in _VARIABLES:
            yield by_trainer(f"spec.trainer.env[{index}]", f"{item['name']} is Trainer's")


def enforce(info: Info) -> None:
    """``XGBoost.EnforceMLPolicy``: a worker for each GPU, else one for each pod."""
    info.set_trainer_count()
    node = info.trainer_node()
    if info.trainer is None or node is None:
        return
    set_env(node, given_variables(info.trainer.get("env") or ()))
    workers = info.trainer_count() * max(1, gpus(info.counted_resources()))
    values: tuple[str | Json, ...] = (
        info.first_host,
        str(TRAINER_PORT),
        COMPLETION_INDEX_FIELD,
        str(workers),
    )
    set_env(node, map(variable, _VARIABLES, values))
    set_ports(node, [{"containerPort": TRAINER_PORT}])
