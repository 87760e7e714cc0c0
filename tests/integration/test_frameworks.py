"""`CacheIterableDataset.loader` in training frameworks, on two ranks that read a real cache."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cache_client import CacheClient, DatasetSpec
from cache_server import LocalCluster
from tests.conftest import write_numbered

ROOT = Path(__file__).resolve().parents[2]
ROWS = 1003  # 31 steps of 32 rows, and a last one of 11
NEEDED = ("accelerate", "lightning", "transformers", "torchdata", "jax")

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.timeout(260),  # the packages take seconds of a core to import
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in NEEDED),
        reason=f"not installed: one of {', '.join(NEEDED)}",
    ),
]

Found = dict[str, list[Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    """Case -> what each rank of `tests/framework_ranks.py` saw."""
    folder = tmp_path_factory.mktemp("frameworks")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
        # As torchrun sets them, beside those that the script sets for each rank.
        **{"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0", "ROLE_RANK": "0"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "run"},
    }
    with LocalCluster(nodes=2) as cluster:
        source = write_numbered(folder / "source", ROWS, files=2)
        client = CacheClient(cluster.endpoint)
        client.load(DatasetSpec("table", source))
        houses = "SELECT a AS area, b AS price FROM source"
        client.load(DatasetSpec("houses", source, sql=houses))  # of docs/frameworks.md
        script = str(ROOT / "tests/framework_ranks.py")
        done = subprocess.run(
            [sys.executable, script, cluster.endpoint, "table", str(folder)],
            env=environment, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    yield json.loads(line.removeprefix("FOUND "))


def of_both(ranks: list[Any]) -> dict[str, list[Any]]:
    """Key of a case -> what rank 0 and rank 1 have; the error of a case is one of the test."""
    assert all(isinstance(rank, dict) for rank in ranks), ranks
    return {key: [rank[key] for rank in ranks] for key in ranks[0]}


def assert_every_row(ranks: list[list[int]], times: int = 1) -> None:
    seen = sorted(row for rank in ranks for row in rank)
    assert seen == [row for row in range(ROWS) for _ in range(times)]


def test_accelerate_leaves_the_loader_alone(found: Found) -> None:
    cases = of_both(found["accelerate_prepares_the_loader"])
    assert len(cases) == 7
    for ranks in cases.values():
        assert_every_row(ranks)


def test_what_accelerate_would_divide_again_is_refused_on_every_rank(found: Found) -> None:
    cases = of_both(found["accelerate_prepares_a_plain_data_loader"])
    assert set(cases) == {"default", "dispatch", "divide", "stateful", "spawn"}
    for errors in cases.values():
        for error in errors:
            assert error.startswith("ConfigError: the dataset is divided among 2 ranks already")
            assert "use dataset.loader(num_workers=...)" in error


def test_accelerate_knows_which_batch_is_the_last(found: Found) -> None:
    for rank in found["accelerate_knows_the_last_batch"]:
        assert rank == {"ends": [False] * 31 + [True], "after": False}


def test_a_checkpoint_of_accelerate_resumes_with_other_workers(found: Found) -> None:
    for ranks in of_both(found["accelerate_saves_the_state"]).values():
        assert_every_row(ranks)


def test_accelerate_places_batches_unless_it_was_told_not_to(found: Found) -> None:
    for rank in found["accelerate_moves_batches_to_its_device"]:
        assert rank == {"placed": "meta", "left": "cpu"}


def test_gather_for_metrics_counts_each_row_once(found: Found) -> None:
    cases = of_both(found["gather_for_metrics_counts_each_row_once"])
    for workers in (0, 2):
        for rank in cases[f"rows {workers}"]:
            assert_every_row([rank])
        assert cases[f"sizes {workers}"] == [[16], [16]]


def test_collectives_take_columns_and_the_mask_drops_repeated_rows(found: Found) -> None:
    for rank in found["collectives_over_columns_and_a_mask"]:
        assert_every_row([rank["rows"]])
        assert rank["broadcast"] and rank["beside"]


def test_ranks_of_one_tensor_parallel_group_read_the_same_rows(found: Found) -> None:
    for rank in found["a_mesh_with_a_tensor_parallel_dimension"]:
        assert_every_row([rank["mesh"]])
        assert rank["group"] == rank["mesh"]
        (warning,) = rank["warned"]
        assert "divides the model (tp)" in warning and "data_parallel=" in warning
        assert (
            rank["both"]
            == "ConfigError: rank and data_parallel exclude each other: give one of them"
        )


def test_lightning_leaves_the_loader_alone(found: Found) -> None:
    cases = of_both(found["lightning_fits_validates_and_predicts"])
    for way in ("fit True 0", "fit False 2"):
        assert_every_row(cases[way])
    for way in ("validate", "predict"):
        seen = [row for rank in cases[way] for row in rank]
        assert len(seen) == len(set(seen)) == 31 * 32


def test_lightning_tells_the_loader_the_epoch_and_fabric_leaves_it(found: Found) -> None:
    cases = of_both(found["lightning_tells_the_loader_the_epoch"])
    assert_every_row(cases.pop("rows"))
    assert all(value == [True, True] for value in cases.values()), cases


def test_a_checkpoint_of_lightning_resumes_with_other_workers(found: Found) -> None:
    for ranks in of_both(found["lightning_resumes_by_the_state_of_the_loader"]).values():
        assert_every_row(ranks)


def test_lightning_resumes_torchdatas_loader_or_is_refused_where_it_saved_at_a_last_step(
    found: Found,
) -> None:
    cases = of_both(found["lightning_resumes_a_stateful_loader_of_torchdata"])
    assert_every_row(cases["middle"])
    for name in ("end", "limit"):
        for error, trained in cases[name]:
            assert error.startswith("ConfigError: ") and "Lightning begins epoch 1" in error
            assert "use dataset.loader(), whose set_epoch Lightning calls" in error
            assert trained == []


def test_fabric_leaves_the_loader_alone(found: Found) -> None:
    for ranks in of_both(found["fabric_sets_up_the_loader"]).values():
        assert_every_row(ranks)


def test_the_trainer_of_transformers_reads_the_loader(found: Found) -> None:
    for ranks in of_both(found["the_trainer_of_transformers_trains"]).values():
        assert_every_row(ranks, times=2)  # epochs


def test_the_trainer_of_transformers_evaluates_each_row_once(found: Found) -> None:
    for rank in found["the_trainer_of_transformers_evaluates"]:
        assert_every_row([rank["rows"]])


def test_the_trainer_of_transformers_gets_one_clear_error_for_the_dataset(found: Found) -> None:
    cases = of_both(found["the_trainer_of_transformers_gets_the_dataset_itself"])
    assert set(cases) == {"default", "divide"}
    for errors in cases.values():
        for error in errors:
            assert error.startswith("ConfigError: ") and "use TrainsFromCache" in error


def test_every_snippet_of_the_page_runs_on_two_ranks(found: Found) -> None:
    cases = of_both(found["snippets_of_the_page"])
    assert len(cases) == 12
    for block, ranks in cases.items():
        assert ranks == ["ran", "ran"], block
