"""Train on a cached table with XGBoost on several workers; each one reads its own rows.

    export DMLC_NUM_WORKER=2 DMLC_TRACKER_URI=127.0.0.1 DMLC_TRACKER_PORT=9091
    for task in 0 1; do DMLC_TASK_ID=$task python examples/train_xgboost.py & done; wait

In a TrainJob whose runtime has the policy ``xgboost``, Kubeflow Trainer sets these variables, and
the first pod runs the tracker. Without them there is one worker. For CPUs: a pod with several GPUs
has a worker for each, which you start.

XGBoost builds its matrix from batches: it never has the table as one array. It passes over the rows
several times, always in the same order.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import xgboost
from xgboost import collective

from cache_client import CacheIterableDataset

FEATURES = ["quantity", "discount", "tax", "part"]


class CachedRows(xgboost.DataIter):
    """The rows of this worker, batch by batch."""

    def __init__(self, dataset: CacheIterableDataset) -> None:
        super().__init__()
        self._dataset = dataset
        self._batches: Iterator[Any] = iter(())

    def next(self, input_data: Callable[..., None]) -> bool:
        """Gives one batch to XGBoost; False after the last one."""
        batch = next(self._batches, None)
        if batch is not None:
            input_data(data=batch["features"], label=batch["price"])
        return batch is not None

    def reset(self) -> None:
        """Begins again."""
        self._batches = iter(self._dataset)


@contextlib.contextmanager
def workers() -> Iterator[None]:
    """Connects the workers that the variables of XGBoost name."""
    number, task = int(os.environ.get("DMLC_NUM_WORKER", 1)), os.environ.get("DMLC_TASK_ID", "0")
    if number == 1:
        yield
        return
    host = socket.gethostbyname(os.environ["DMLC_TRACKER_URI"])
    port = int(os.environ["DMLC_TRACKER_PORT"])
    tracker = None
    if task == "0":
        tracker = xgboost.RabitTracker(number, host, port, sortby="task")
        tracker.start()
    with collective.CommunicatorContext(
        dmlc_tracker_uri=host, dmlc_tracker_port=port, dmlc_task_id=task
    ):
        yield
    if tracker is not None:
        tracker.wait_for()


def main() -> None:
    """Trains; prints the error of each round, and whether every row was used exactly once."""
    parser = argparse.ArgumentParser(description="Train with XGBoost")
    parser.add_argument("--endpoint", help="default: CACHE_ENDPOINT")
    parser.add_argument("--dataset", default="lineitem")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=4096)
    arguments = parser.parse_args()
    with workers():  # the dataset finds its rank in XGBoost's collective
        dataset = CacheIterableDataset(
            arguments.dataset,
            cache=arguments.endpoint,
            batch_size=arguments.batch_size,
            columns=["row_key", *FEATURES, "price"],
            stack={"features": FEATURES},
            batch_format="numpy",
        )
        rows = xgboost.QuantileDMatrix(CachedRows(dataset))
        errors: dict[str, dict[str, list[float]]] = {}
        xgboost.train(
            {"objective": "reg:squarederror", "tree_method": "hist", "nthread": 1},
            rows,
            num_boost_round=arguments.rounds,
            evals=[(rows, "train")],
            evals_result=errors,
            verbose_eval=False,
        )
        keys = np.concatenate([batch["row_key"] for batch in dataset])
        told = np.array([len(keys), len(np.unique(keys)), rows.num_row(), keys.sum()], np.int64)
        read, distinct, used, total = collective.allreduce(told, collective.Op.SUM)
        if collective.get_rank() == 0:
            first, *_, last = errors["train"]["rmse"]
            exact = read == distinct == used == dataset.num_rows
            print(f"error {first:.4f} -> {last:.4f}, {collective.get_world_size()} workers")
            print(f"{used} of {dataset.num_rows} rows, exactly once: {exact}, keys {total}")


if __name__ == "__main__":
    main()
