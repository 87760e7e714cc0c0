"""The shipped runtimes under ``run-local``: real cache nodes, real trainers, real rows."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import cache_runtimes
from cache_client import CacheClient
from cache_runtimes.local import Console, read_manifests, run_local
from cache_server import LocalCluster
from tests import forked_python
from tests.kubeflow_backend import EXAMPLES, lineitem
from tests.train_jobs import env, train_job, write

Json = dict[str, Any]

FLAGSHIP = "torch-distributed-data-cache"
COLOCATED = "torch-distributed-data-cache-colocated"
ROWS = 2_000
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

MPIRUN = f"{sysconfig.get_path('scripts')}/mpirun"
# Open MPI 5, which pip installs, does not read the variables of Trainer.
LAUNCH = ["--hostfile", "/etc/mpi/hostfile", "-n", "2", "python"]

# Reads one epoch, writes the ids of its rows, and says which step it is at. Over the network, as
# trainers on other machines do.
TRAIN = """
import json, os, pathlib, time
from cache_client import CacheIterableDataset, Connection, Reading
from cache_client.job.ranks import find_rank

rank = find_rank()
folder = pathlib.Path(os.environ["DIR"])
dataset = CacheIterableDataset(
    "rows", cache=Connection(local=False), batch_size=50, shuffle=True,
    reading=Reading(prefetch_batches=1),
)
ids = []
for step, batch in enumerate(dataset):
    ids.extend(batch["id"].tolist())
    print("step", step, flush=True)
    {hook}
name = f"rank-{rank.rank}-of-{rank.world_size}.json"
(folder / name).write_text(json.dumps(ids))
"""


needs_ssh = pytest.mark.skipif(
    not Path("/usr/sbin/sshd").exists(), reason="no sshd; the package openssh-server has one"
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Parquet files with the column id, 0 to ROWS."""
    folder = tmp_path_factory.mktemp("data") / "rows"
    folder.mkdir()
    ids = np.arange(ROWS)
    for number, part in enumerate(np.array_split(ids, 4)):
        table = pa.table({"id": part, "x": part.astype(np.float32)})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=100)
    return folder


class Run:
    """One run of a TrainJob in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[tuple[str, str]] = []
        self.events: list[str] = []
        self.on_line: Callable[[str, str], None] = lambda pod, text: None

    def __call__(
        self,
        job: Json,
        hosts: dict[str, str] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> int:
        path = write(self.folder / "job.yaml", job)
        manifests = read_manifests(path, cache_runtimes.MANIFESTS)

        def line(pod: str, container: str, text: str) -> None:
            self.lines.append((pod, text))
            self.on_line(pod, text)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "executable", forked_python.executable())
            return run_local(
                manifests,
                environment=os.environ,
                extra_environment={"DIR": str(self.folder), **AS_ROOT, **(environment or {})},
                console=Console(event=self.events.append, line=line),
                hosts=hosts,
                backoff_s=0.05,
            )

    def of(self, pod: str, word: str) -> list[str]:
        """Lines with a word in them, of the pods whose name has ``pod`` in it."""
        return [text for name, text in self.lines if pod in name and word in text]

    def ids(self, world_size: int) -> list[list[int]]:
        paths = [self.folder / f"rank-{i}-of-{world_size}.json" for i in range(world_size)]
        return [json.loads(path.read_text()) for path in paths]

    def report(self) -> str:
        return "\n".join([*(f"{pod} | {text}" for pod, text in self.lines), *self.events])


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def job(
    rows: Path | str, run: Run, *, hook: str = "pass", name: str = "job", **trainer: Any
) -> Json:
    """Two trainer nodes on the flagship; ``hook`` is done in each step."""
    program = run.folder / "train.py"
    program.write_text(TRAIN.replace("{hook}", hook), encoding="utf-8")
    uri = str(rows) if "://" in str(rows) else f"file://{rows}"
    wanted = {
        "numNodes": 2,
        "numProcPerNode": 1,
        "command": ["python"],
        "args": [str(program)],
        **trainer,
    }
    return train_job(
        name,
        runtimeRef={"name": FLAGSHIP},
        initializer={"dataset": {"storageUri": uri, "env": env(CACHE_TARGET_SHARD_BYTES="4KiB")}},
        trainer=wanted,
    )


def assert_once(run: Run, world_size: int) -> None:
    ids = run.ids(world_size)
    assert sorted(row for rank in ids for row in rank) == list(range(ROWS)), run.report()
    assert {len(rank) for rank in ids} == {ROWS // world_size}


def test_two_cache_pods_serve_two_trainer_nodes_of_two_ranks(rows: Path, run: Run) -> None:
    code = run(job(rows, run, numProcPerNode=2, command=["torchrun"]))
    assert code == 0, run.report()
    assert_once(run, world_size=4)
    assert run.events[-1] == "TrainJob job is complete"
    # Both pods hold shards, and say goodbye.
    for index in range(2):
        assert run.of(f"dataset-initializer-0-{index}", "shard sealed"), run.report()
        assert run.of(f"dataset-initializer-0-{index}", "node down"), run.report()


@pytest.mark.parametrize("index", [0, 1], ids=["coordinator", "other node"])
def test_a_killed_cache_process_is_restarted_in_place_and_training_goes_on(
    rows: Path, run: Run, index: int
) -> None:
    pids: list[int] = []

    def on_line(pod: str, text: str) -> None:
        if pod.endswith(f"initializer-0-{index}") and text.startswith('{"event": "listening"'):
            pids.append(json.loads(text)["pid"])
            if len(pids) == 2:
                (run.folder / "restarted").touch()
        if text == "step 3" and not (run.folder / "killed").exists():
            os.kill(pids[0], signal.SIGKILL)
            (run.folder / "killed").touch()

    run.on_line = on_line
    # Steps 4 to 18 are read while the node restarts; the last one waits until it has.
    hook = """awaited = {3: "killed", 19: "restarted"}.get(step)
    while awaited and not (folder / awaited).exists(): time.sleep(0.01)"""
    code = run(job(rows, run, hook=hook))
    assert code == 0, run.report()
    assert_once(run, world_size=2)
    restarts = [event for event in run.events if "restarted in place" in event]
    assert len(restarts) == 1, run.report()
    assert (
        f"dataset-initializer-0-{index}/dataset-initializer ended with exit code 137"
        in (restarts[0])
    )
    assert len(pids) == 2
    # Every shard was loaded once: the process found those of its former life in memory.
    sealed = [re.search(r"shard=(\d+)", line) for line in run.of("initializer", "shard sealed")]
    shards = [match[1] for match in sealed if match]
    assert len(shards) == len(set(shards)) > 2
    assert not any("another pod takes its place" in event for event in run.events)


def test_a_trainer_that_fails_is_replaced_and_the_cache_is_not_touched(
    rows: Path, run: Run
) -> None:
    hook = (
        'if step == 3 and rank.rank == 1 and not (folder / "failed").exists():\n'
        '        (folder / "failed").touch(); raise SystemExit(1)'
    )
    code = run(job(rows, run, hook=hook))
    assert code == 0, run.report()
    assert_once(run, world_size=2)
    assert len([event for event in run.events if "another pod takes its place" in event]) == 1
    assert len(run.of("initializer", "listening")) == 2


@pytest.mark.parametrize(
    ("uri", "code", "words"),
    [
        ("gopher://bucket/rows", 78, ["STORAGE_URI='gopher://bucket/rows'", "ConfigError"]),
        ("file:///nowhere/rows", 65, ["LoadError", "/nowhere/rows"]),
    ],
)
def test_a_bad_storage_uri_fails_the_job_with_the_reason_in_the_last_line(
    run: Run, uri: str, code: int, words: list[str]
) -> None:
    assert run(job(uri, run)) == code, run.report()
    assert run.events[-1].startswith("TrainJob job failed: dataset-initializer: PodFailurePolicy")
    for word in words:
        assert word in run.events[-1]
    assert not run.of("node", "step")


def test_the_cache_may_be_a_sidecar_of_every_trainer(rows: Path, run: Run) -> None:
    made = job(rows, run)
    del made["spec"]["initializer"]
    made["spec"]["runtimeRef"]["name"] = COLOCATED
    variables = env(STORAGE_URI=f"file://{rows}", CACHE_TARGET_SHARD_BYTES="4KiB")
    sidecar = {"name": "cache", "env": variables}
    template = {"spec": {"template": {"spec": {"initContainers": [sidecar]}}}}
    made["spec"]["runtimePatches"] = [
        {
            "manager": "example.com/test",
            "trainingRuntimeSpec": {
                "template": {"spec": {"replicatedJobs": [{"name": "node", "template": template}]}}
            },
        }
    ]
    assert run(made) == 0, run.report()
    assert_once(run, world_size=2)
    for index in range(2):
        assert run.of(f"node-0-{index}", "shard sealed"), run.report()


def test_a_job_on_the_shared_cache_loads_its_dataset_there_and_leaves_it(
    rows: Path, run: Run
) -> None:
    made = job(rows, run, numNodes=1)
    made["spec"]["runtimeRef"]["name"] = "torch-distributed-shared-data-cache"
    with LocalCluster(nodes=1) as cluster:
        service = cluster.endpoint.removeprefix("grpc://")
        assert run(made, {"data-cache.data-cache-system:50051": service}) == 0, run.report()
        assert_once(run, world_size=1)
        (info,) = CacheClient(cluster.endpoint).datasets()
        assert (info.name, info.state) == ("rows", "ready")


def test_processes_of_jax_find_their_ranks_and_the_cache(rows: Path, run: Run) -> None:
    made = job(rows, run)
    made["spec"]["runtimeRef"]["name"] = "jax-distributed-data-cache"
    del made["spec"]["trainer"]["numProcPerNode"]
    assert run(made) == 0, run.report()
    assert_once(run, world_size=2)


@needs_ssh
@pytest.mark.frameworks
def test_mpirun_of_the_launcher_starts_ranks_in_other_pods_over_ssh(rows: Path, run: Run) -> None:
    hook = 'print("in", os.environ["HOSTNAME"], os.environ["TRAIN_JOB_NAME"], flush=True)'
    made = job(rows, run, hook=hook)
    trainer = made["spec"]["trainer"]
    trainer |= {"command": [MPIRUN], "args": [*LAUNCH, *trainer["args"]]}
    made["spec"]["runtimeRef"]["name"] = "deepspeed-data-cache"
    assert run(made) == 0, run.report()
    assert_once(run, world_size=2)
    for name in ("launcher", "node"):
        assert run.of("launcher", f"in job-{name}-0-0 job"), run.report()
    assert run.of("node", "Accepted publickey"), run.report()


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"not installed: {package}")


def lineitem_job(run: Run, runtime: str, script: str, **trainer: Any) -> Json:
    """A script of examples/ on TPC-H lineitem, in two pods."""
    made = job(lineitem(run.folder / "tpch"), run, **trainer)
    sql = yaml.safe_load((EXAMPLES / "lineitem.yaml").read_text())["sql"]
    made["spec"]["initializer"]["dataset"]["env"] = env(CACHE_SQL=sql, CACHE_DATASET="lineitem")
    made["spec"]["runtimeRef"]["name"] = runtime
    made["spec"]["trainer"]["args"] = [str(EXAMPLES / script)]
    del made["spec"]["trainer"]["numProcPerNode"]
    return made


@pytest.mark.frameworks
@needs("xgboost")
def test_workers_of_xgboost_build_one_model_of_all_rows(run: Run) -> None:
    made = lineitem_job(run, "xgboost-data-cache", "train_xgboost.py")
    assert run(made) == 0, run.report()
    (errors,) = run.of("node-0-0", "error")
    assert "2 workers" in errors
    first, last = map(float, re.findall(r"\d\.\d+", errors))
    assert last < first
    (rows,) = run.of("node-0-0", "exactly once")
    keys = pq.read_table(run.folder / "tpch/lineitem", columns=["l_orderkey", "l_linenumber"])
    orders, numbers = (sum(column.to_pylist()) for column in keys.columns)
    total = 8 * orders + numbers
    assert rows == f"6005 of 6005 rows, exactly once: True, keys {total}"


@needs_ssh
@pytest.mark.frameworks
@needs("mlx")
def test_ranks_of_mlx_in_two_pods_train_one_model(run: Run) -> None:
    made = lineitem_job(run, "mlx-data-cache", "train_mlx.py", command=[MPIRUN])
    made["spec"]["trainer"]["args"] = [*LAUNCH, *made["spec"]["trainer"]["args"]]
    # The Open MPI that pip installs is in no folder where the system looks.
    library = str(Path(sysconfig.get_path("data")) / "lib/libmpi.so.40")
    # Both pods are this machine, where the component "han" of Open MPI 5 for several hosts crashes.
    environment = {"MLX_MPI_LIBNAME": library, "OMPI_MCA_coll": "^han"}
    assert run(made, environment=environment) == 0, run.report()
    epochs = run.of("launcher", "6,005 of 6,005 rows seen exactly once")
    assert len(epochs) == 2, run.report()
    assert run.of("node", "Accepted publickey"), run.report()


def test_an_interrupted_job_leaves_no_process_and_no_file(rows: Path, run: Run) -> None:
    name = "interrupted"
    made = job(rows, run, hook="time.sleep(100)", name=name)
    process = forked_python.Popen(
        [
            *(sys.executable, "-m", "cache_client", "run-local"),
            str(write(run.folder / "job.yaml", made)),
            *("--env", f"DIR={run.folder}"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=forked_python.environ(),
    )
    try:
        assert process.stdout is not None
        pids = []
        for line in process.stdout:
            if '"event": "listening"' in line:
                pids.append(json.loads(line.partition(" | ")[2])["pid"])
            if line.endswith("| step 0\n"):
                break
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, rest
    assert rest.splitlines()[-1] == f"run-local: TrainJob {name} was stopped by SIGINT"
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    for root in (Path("/dev/shm"), Path("/tmp")):
        assert not list(root.glob(f"run-local-{name}-*"))
