"""The plugin of PyTorch: variables of torchrun, and the command of TorchTune. Pure.

``pkg/runtime/framework/plugins/torch/{torch,torchtune}.go`` of kubeflow/trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cache_runtimes.local.trainer.info import (
    COMPLETION_INDEX_FIELD,
    TRAINER,
    TRAINER_PORT,
    Info,
    Json,
    ancestor,
    containers,
    given_variables,
    gpus,
    main_container,
    set_env,
    set_ports,
    variable,
)
from cache_runtimes.local.trainer.quantities import rounded_up
from cache_runtimes.local.trainer.refusals import Refusal, by_trainer

VARIABLES = (
    *("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
)
_TUNE = ["tune", "run"]
_LARGEST_MODEL = "llama3_3/70B"
_QWEN = "qwen2_5/1.5B"
_SMALL_LLAMAS = ("llama3_2/1B", "llama3_2/3B")
_MODELS = (*_SMALL_LLAMAS, _LARGEST_MODEL, _QWEN)
# The runtime sets them, in its command.
_RUNTIME_ARGUMENTS = (
    *("output_dir", "tokenizer.path", "checkpointer.checkpoint_dir", "tokenizer.merges_file"),
)


def problems(info: Info) -> Iterator[Refusal]:
    """``Torch.Validate`` and ``validateTorchTune``."""
    for target in _targets(info):
        index = info.job_index(target["jobName"])
        known = [c["name"] for c in containers(info.jobs[index])] if index is not None else []
        for name in target["containerNames"]:
            if name not in known:
                where = f"{target['jobName']!r} has no container {name!r} for envInjection"
                yield by_trainer("spec.runtimeRef", f"the runtime's replicated job {where}")
    if info.trainer is None:
        return
    reserved = {item["name"] for item in info.trainer.get("env") or ()} & {*VARIABLES}
    if reserved:
        yield by_trainer("spec.trainer.env", f"must not have {', '.join(sorted(reserved))}")
    if _is_tune(info.trainer):
        yield from _tune_problems(info, info.trainer)


def enforce(info: Info) -> None:
    """``Torch.EnforceMLPolicy``."""
    info.set_trainer_count()
    values: tuple[str | Json, ...] = (
        str(info.trainer_count()),
        _processes_per_node(info),
        COMPLETION_INDEX_FIELD,
        info.first_host,
        str(TRAINER_PORT),
    )
    every = [variable(name, value) for name, value in zip(VARIABLES, values, strict=True)]
    node = info.trainer_node()
    if info.trainer is not None and node is not None:
        set_env(node, given_variables(info.trainer.get("env") or ()))
        set_env(node, every[:3] if _is_tune(info.trainer) else every)
        if _is_tune(info.trainer):
            info.trainer["command"] = _TUNE + _tune_arguments(info, info.trainer)
        set_ports(node, [{"containerPort": TRAINER_PORT}])
    _inject(info, every)


def _inject(info: Info, variables: Sequence[Json]) -> None:
    """The same variables in the containers that ``envInjection`` names."""
    for target in _targets(info):
        index = info.job_index(target["jobName"])
        for found in containers(info.jobs[index]) if index is not None else ():
            if found["name"] in target["containerNames"]:
                set_env(found, variables)


def _targets(info: Info) -> list[Json]:
    torch = (info.policy or {}).get("torch") or {}
    return list((torch.get("envInjection") or {}).get("targets") or ())


def _processes_per_node(info: Info) -> str:
    given = (info.trainer or {}).get("numProcPerNode")
    if given is not None:
        return str(given)
    resources = info.counted_resources()
    if gpus(resources):
        return "auto"
    for part in ("requests", "limits"):
        cpus = rounded_up((resources.get(part) or {}).get("cpu", 0))
        if cpus:
            return str(cpus)
    return "1"


def _is_tune(trainer: Json) -> bool:
    return trainer.get("command") == _TUNE


def _model(info: Info) -> str:
    """The model that the name of the runtime says: ``getModelFromRuntimeRef``."""
    parts = info.runtime_name.split("-")
    return f"{parts[1].replace('.', '_')}/{parts[2].upper()}" if len(parts) == 3 else ""


def _recipe(info: Info, trainer: Json, count: int, processes: str) -> tuple[str, str]:
    """The recipe and the suffix of its configuration: ``getRecipeAndConfig``."""
    arguments = trainer.get("args") or ()
    dora = any("use_dora" in text for text in arguments)
    qlora = not dora and any("quantize_base" in text for text in arguments)
    lora = any("lora_attn_modules" in text for text in arguments)
    if count == 1 and (processes == "1" or gpus(info.counted_resources()) == 1):
        if qlora or lora:
            return "lora_finetune_single_device", f"_{'q' * qlora}lora_single_device"
        return "full_finetune_single_device", "_full_single_device"
    if count == 1 and (qlora or lora):
        return "lora_finetune_distributed", f"_{'q' * qlora}lora"
    return "full_finetune_distributed", "_full_multinode" if count > 1 else "_full"


def _tune_arguments(info: Info, trainer: Json) -> list[str]:
    count, processes = info.trainer_count(), _processes_per_node(info)
    several = processes not in ("auto", "1") or (
        processes == "auto" and gpus(info.counted_resources()) > 1
    )
    endpoint = f"--rdzv_endpoint={info.first_host}:{TRAINER_PORT}"
    recipe, suffix = _recipe(info, trainer, count, processes)
    own = [
        text
        for job in info.jobs
        if ancestor(job) == TRAINER and (node := main_container(job, "node")) is not None
        for text in node.get("command") or ()
        if text.split("=")[0] in _RUNTIME_ARGUMENTS
    ]
    rendezvous = [endpoint] if count > 1 or several else []
    return [*rendezvous, recipe, "--config", f"{_model(info)}{suffix}", *own]


def _tune_problems(info: Info, trainer: Json) -> Iterator[Refusal]:
    model, count = _model(info), trainer.get("numNodes")
    count = 1 if count is None else count
    if model not in _MODELS:
        yield by_trainer(
            "spec.runtimeRef.name", f"{info.runtime_name!r} names no model that Trainer knows"
        )
    if count > 1 and model != _LARGEST_MODEL:
        yield by_trainer("spec.trainer.numNodes", f"must be 1 for the model {model}, got {count}")
    given = trainer.get("numProcPerNode")
    _, suffix = _recipe(info, trainer, count, "auto" if given is None else str(given))
    if suffix.startswith("_qlora"):
        if model == _QWEN:
            yield by_trainer("spec.runtimeRef.name", f"the model {model} has no QLoRA")
        if suffix == "_qlora" and model in _SMALL_LLAMAS:
            why = f"QLoRA of the model {model} needs one process and one GPU"
            yield by_trainer("spec.trainer.numProcPerNode", why)
            yield by_trainer("spec.trainer.resourcesPerNode", why)
    if count > 1 and any("lora_attn_modules" in text for text in trainer.get("args") or ()):
        yield by_trainer("spec.trainer.numNodes", f"LoRA runs on one node, got {count}")
    for index, text in enumerate(trainer.get("args") or ()):
        if text.split("=")[0] in _RUNTIME_ARGUMENTS:
            yield by_trainer(f"spec.trainer.args[{index}]", f"the runtime sets {text!r}")
