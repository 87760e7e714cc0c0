"""The plugin of runtimes without a framework. Pure.

``pkg/runtime/framework/plugins/plainml/plainml.go`` of kubeflow/trainer.
"""

from __future__ import annotations

from cache_runtimes.local.trainer.info import Info, given_variables, set_env


def enforce(info: Info) -> None:
    """``PlainML.EnforceMLPolicy``."""
    info.set_trainer_count()
    node = info.trainer_node()
    if info.trainer is not None and node is not None:
        set_env(node, given_variables(info.trainer.get("env") or ()))
