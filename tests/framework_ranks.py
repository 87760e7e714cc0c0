"""Two ranks that put a cached table through training frameworks, each as its tutorial does.

    python framework_ranks.py ENDPOINT DATASET FOLDER

The packages take seconds of a core to import, so both ranks fork from one process that has them.
Prints a JSON object: case -> what each rank saw, or the error that it got.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import accelerate
import lightning
import torch
import torch.distributed as dist
import torch.distributed.nn
import transformers.trainer
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from cache_client import CacheIterableDataset
from tests.job_arguments import grouped

WORLD_SIZE = 2
BATCH_SIZE = 16

PAGE = (Path(__file__).resolve().parents[1] / "docs/frameworks.md").read_text(encoding="utf-8")
CASES: dict[str, Callable[[], Any]] = {}
ENDPOINT, NAME, FOLDER = sys.argv[1], sys.argv[2], Path(sys.argv[3])


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


def dataset(**options: Any) -> CacheIterableDataset:
    given = {"batch_size": BATCH_SIZE, "shuffle": True, "columns": ["row", "a", "label"]}
    return CacheIterableDataset(NAME, **grouped(cache=ENDPOINT, **{**given, **options}))


def rows(batches: Iterable[Any]) -> list[int]:
    return [row for batch in batches for row in batch["row"].tolist()]


def error_of(read: Callable[[], Any]) -> str:
    try:
        return f"no error, but {read()!r:.200}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def accelerator(**options: Any) -> Accelerator:
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))


# -- Accelerate ----------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "dispatch": {"dispatch_batches": True},
    "divide": {"dispatch_batches": False},
    "split": {"split_batches": True},
    "stateful": {"dispatch_batches": False, "use_stateful_dataloader": True},
}


@case
def accelerate_prepares_the_loader() -> Any:
    found = {}
    for way, options in WAYS.items():
        for workers in (0, 2) if way in ("default", "divide") else (0,):
            loader = dataset().loader(num_workers=workers)
            prepared = accelerator(**options).prepare(loader)
            assert prepared is loader
            found[f"{way} {workers}"] = rows(prepared)
    return found


@case
def accelerate_prepares_a_plain_data_loader() -> Any:
    found = {}
    for way, options in WAYS.items():
        if way == "split":  # accelerate refuses batch_size=None
            continue
        made = DataLoader(dataset(), batch_size=None)
        found[way] = error_of(lambda made=made, options=options: rows(
            accelerator(**options).prepare(made)
        ))  # fmt: skip
    spawned = DataLoader(dataset(), batch_size=None, num_workers=1, multiprocessing_context="spawn")
    found["spawn"] = error_of(lambda: rows(accelerator().prepare(spawned)))
    return found


@case
def accelerate_knows_the_last_batch() -> Any:
    made = accelerator()
    loader = made.prepare(dataset().loader())
    ends = [made.gradient_state.end_of_dataloader for _ in loader]
    return {"ends": ends, "after": made.gradient_state.end_of_dataloader}


@case
def accelerate_saves_the_state() -> Any:
    """10 batches, a checkpoint, and the rest by another loader, with other workers."""
    found = {}
    for before, after in ((0, 2), (2, 0)):
        folder = str(FOLDER / f"state-{before}")
        made = accelerator()
        loader = made.prepare(dataset().loader(num_workers=before))
        loader.set_epoch(3)
        seen = []
        for step, batch in enumerate(loader, 1):
            seen += batch["row"].tolist()
            if step == 10:
                made.save_state(folder)
                break
        made.wait_for_everyone()
        again = accelerator()
        resumed = again.prepare(dataset().loader(num_workers=after))
        again.load_state(folder)
        seen += rows(resumed)
        found[f"{before} {after}"] = seen
    return found


@case
def accelerate_moves_batches_to_its_device() -> Any:
    made = accelerator()
    made.state.device, kept = torch.device("meta"), made.state.device
    try:
        placed = next(iter(made.prepare(dataset().loader())))["row"].device.type
        unplaced = made.prepare(dataset().loader(), device_placement=[False])
        left = next(iter(unplaced))["row"].device.type
    finally:
        made.state.device = kept
    return {"placed": placed, "left": left}


@case
def gather_for_metrics_counts_each_row_once() -> Any:
    found = {}
    for workers in (0, 2):
        made = accelerator()
        loader = made.prepare(dataset(pad_mask="valid").loader(num_workers=workers))
        gathered, sizes = [], set()
        for batch in loader:
            sizes.add(len(batch["row"]))
            gathered += made.gather_for_metrics(batch["row"]).tolist()
        found[f"rows {workers}"], found[f"sizes {workers}"] = gathered, list(sizes)
    return found


@case
def collectives_over_columns_and_a_mask() -> Any:
    """The recipe of the page: gather, then drop the repeated rows; and a broadcast in place."""
    seen: list[int] = []
    for batch in dataset(pad_mask="valid").loader():
        both = [torch.empty_like(batch["row"]) for _ in range(WORLD_SIZE)]
        masks = [torch.empty_like(batch["valid"]) for _ in range(WORLD_SIZE)]
        dist.all_gather(both, batch["row"])
        dist.all_gather(masks, batch["valid"])
        seen += torch.cat(both)[torch.cat(masks)].tolist()
    batch = next(iter(dataset(columns=["a", "b", "row"], rank=dist.get_rank(), world_size=2)))
    before = {name: column.clone() for name, column in batch.items()}
    dist.broadcast(batch["a"], 0)
    everywhere = [torch.empty_like(before["a"]) for _ in range(WORLD_SIZE)]
    dist.all_gather(everywhere, before["a"])
    return {
        "rows": seen,
        "broadcast": torch.equal(batch["a"], everywhere[0]),
        "beside": torch.equal(batch["b"], before["b"]),
    }


@case
def a_mesh_with_a_tensor_parallel_dimension() -> Any:
    mesh = init_device_mesh("cpu", (1, WORLD_SIZE), mesh_dim_names=("dp", "tp"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = dataset()
        rows(made.loader())
        made.set_epoch(1)
        rows(made.loader(num_workers=1))
    return {
        "mesh": rows(dataset(data_parallel=mesh).loader()),
        "group": rows(dataset(data_parallel=mesh.get_group("dp")).loader(num_workers=2)),
        "warned": [str(each.message) for each in caught if "data_parallel" in str(each.message)],
        "both": error_of(lambda: dataset(data_parallel=mesh, rank=0, world_size=1)),
    }


# -- Lightning -----------------------------------------------------------------------------------


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[int] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        self.seen += batch["row"].tolist()
        return self.layer(batch["a"][:, None]).square().mean()

    validation_step = predict_step = training_step


def trainer(**options: Any) -> lightning.Trainer:
    given = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "devices": WORLD_SIZE}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(accelerator="cpu", strategy="ddp", **{**given, **quiet, **options})


@case
def lightning_fits_validates_and_predicts() -> Any:
    found = {}
    for sampler, workers in ((True, 0), (False, 2)):
        model = Model()
        trainer(use_distributed_sampler=sampler, num_sanity_val_steps=0).fit(
            model, dataset().loader(num_workers=workers)
        )
        found[f"fit {sampler} {workers}"] = model.seen
    for way in ("validate", "predict"):
        model = Model()
        getattr(trainer(), way)(model, dataset(drop_last=True).loader(), **(
            {"verbose": False} if way == "validate" else {"return_predictions": False}
        ))  # fmt: skip
        found[way] = model.seen
    return found


@case
def lightning_tells_the_loader_the_epoch() -> Any:
    orders = []
    for epochs in (1, 2):
        model = Model()
        trainer(max_epochs=epochs).fit(model, dataset().loader(num_workers=2))
        orders.append(model.seen)
    first, both = orders
    fabric = Fabric(accelerator="cpu", devices=WORLD_SIZE, strategy="ddp")
    fabric.launch()
    loader = dataset().loader()
    loader.set_epoch(1)
    return {
        "rows": both[len(first) :],
        "epoch 0": both[: len(first)] == first,
        "epoch 1": both[len(first) :] == rows(fabric.setup_dataloaders(loader)),
        "another order": both[len(first) :] != first,
    }


@case
def lightning_resumes_by_the_state_of_the_loader() -> Any:
    """A checkpoint after step 10, and the rest with other workers."""
    found = {}
    for before, after in ((2, 0), (0, 2)):
        folder = FOLDER / f"lightning-{before}"
        keep = ModelCheckpoint(folder, "latest", every_n_train_steps=10)
        model, resumed = Model(), Model()
        stopped = trainer(max_steps=10, callbacks=keep, enable_checkpointing=True)
        stopped.fit(model, dataset().loader(num_workers=before))
        dist.barrier()
        path = str(folder / "latest.ckpt")
        trainer().fit(resumed, dataset().loader(num_workers=after), ckpt_path=path)
        found[f"{before} {after}"] = model.seen + resumed.seen
    return found


@case
def lightning_resumes_a_stateful_loader_of_torchdata() -> Any:
    """A checkpoint at the last step that is trained of an epoch, and in the middle."""
    found: dict[str, Any] = {}
    for name, stop, limit in (("end", 32, 1.0), ("limit", 10, 10), ("middle", 10, 1.0)):
        folder = FOLDER / f"stateful-{name}"
        keep = ModelCheckpoint(folder, "latest", every_n_train_steps=stop)
        model, resumed = Model(), Model()
        options = {"limit_train_batches": limit, "use_distributed_sampler": False}
        made = StatefulDataLoader(dataset(), batch_size=None, num_workers=2)
        stopped = trainer(max_steps=stop, callbacks=keep, enable_checkpointing=True, **options)
        stopped.fit(model, made)
        dist.barrier()
        made = StatefulDataLoader(dataset(), batch_size=None, num_workers=2)
        again = trainer(max_epochs=1 if name == "middle" else 2, **options)
        path = str(folder / "latest.ckpt")
        error = error_of(lambda again=again, resumed=resumed, made=made, path=path: again.fit(
            resumed, made, ckpt_path=path
        ))  # fmt: skip
        found[name] = model.seen + resumed.seen if name == "middle" else [error, resumed.seen]
    return found


@case
def fabric_sets_up_the_loader() -> Any:
    found = {}
    for sampler, workers in ((True, 0), (False, 2)):
        fabric = Fabric(accelerator="cpu", devices=WORLD_SIZE, strategy="ddp")
        fabric.launch()
        loader = dataset().loader(num_workers=workers)
        found[f"{sampler} {workers}"] = rows(
            fabric.setup_dataloaders(loader, use_distributed_sampler=sampler)
        )
    return found


# -- Hugging Face --------------------------------------------------------------------------------


class Rows(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[int] = []

    def forward(self, row: torch.Tensor, a: torch.Tensor, label: torch.Tensor) -> Any:
        self.seen += row.tolist()
        logits = self.layer(a[:, None])
        return {"loss": logits.square().mean(), "logits": row}


def without_mask(batch: dict[str, Any]) -> dict[str, Any]:
    """gather_for_metrics drops the repeated rows, and the model takes no mask."""
    return {name: column for name, column in batch.items() if name != "valid"}


class CacheTrainer(transformers.Trainer):
    def get_train_dataloader(self) -> Any:
        return self.train_dataset.loader(num_workers=self.args.dataloader_num_workers)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return (eval_dataset or self.eval_dataset).loader()


def arguments(**options: Any) -> transformers.TrainingArguments:
    given = {"num_train_epochs": 2, "save_strategy": "no", "report_to": "none", "use_cpu": True}
    sizes = {"per_device_train_batch_size": 16, "per_device_eval_batch_size": 16}
    return transformers.TrainingArguments(
        str(FOLDER / "trainer"), disable_tqdm=True, logging_strategy="no",
        ddp_find_unused_parameters=False, **{**given, **sizes, **options},
    )  # fmt: skip


@case
def the_trainer_of_transformers_trains() -> Any:
    found = {}
    for workers in (0, 2):
        model = Rows()
        options = arguments(dataloader_num_workers=workers)
        CacheTrainer(model, options, train_dataset=dataset()).train()
        found[str(workers)] = model.seen
    return found


@case
def the_trainer_of_transformers_evaluates() -> Any:
    predictions: list[int] = []

    def metrics(evaluated: Any) -> dict[str, float]:
        predictions.extend(evaluated.predictions.tolist())
        return {}

    made = CacheTrainer(
        Rows(), arguments(label_names=["label"]), compute_metrics=metrics,
        eval_dataset=dataset(pad_mask="valid", transform=without_mask),
    )  # fmt: skip
    made.evaluate()
    return {"rows": predictions}


@case
def the_trainer_of_transformers_gets_the_dataset_itself() -> Any:
    found = {}
    for way, options in {"default": {}, "divide": {"dispatch_batches": False}}.items():
        made = transformers.Trainer(
            Rows(), arguments(accelerator_config=options), train_dataset=dataset()
        )
        found[way] = error_of(made.train)
    return found


@case
def snippets_of_the_page() -> Any:
    """Every block of docs/frameworks.md, as it stands, on two ranks."""
    os.environ["CACHE_ENDPOINT"] = ENDPOINT
    os.chdir(FOLDER)
    found = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE):
        batches: list[int] = []
        names = {"train_step": lambda area, price, batches=batches: batches.append(len(price))}
        try:
            program = compile(block, "frameworks.md", "exec")
            if "import deepspeed" not in block:  # it compiles C++; examples/ runs the same calls
                exec(program, names)
            found[block] = "ran"
        except Exception as error:
            found[block] = f"{type(error).__name__}: {error}"
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    gc.collect()
    gc.freeze()  # otherwise a collection in a fork, such as a worker, copies every page
    rank = int(os.fork() == 0)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE)}
    store = dist.FileStore(str(FOLDER / "store"), WORLD_SIZE)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE, store=store)
    found = {}
    for name in sys.argv[4:] or CASES:
        try:
            mine = CASES[name]()
        except Exception as error:
            mine = f"{type(error).__name__}: {error}"
            logging.disable(logging.NOTSET)
            logging.exception(name)
            logging.disable(logging.WARNING)
        everywhere = [None] * WORLD_SIZE
        dist.all_gather_object(everywhere, mine)
        found[name] = everywhere
    dist.barrier()
    if rank == 0:
        print("FOUND " + json.dumps(found), flush=True)
        os.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    assert accelerate.__version__ and torch.distributed.nn
    main()
