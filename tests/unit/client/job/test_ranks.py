from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from cache_client.job import parallel_groups
from cache_client.job import ranks as job_ranks
from cache_protocol.errors import ConfigError
from tests import forked_python

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4"}
TRAINER = {"PET_NODE_RANK": "1", "PET_NNODES": "2"}
JAX = {"JAX_PROCESS_ID": "5", "JAX_NUM_PROCESSES": "8"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
PMI = {"PMI_RANK": "6", "PMI_SIZE": "7"}
STEP = {"SLURM_STEP_ID": "0"}
SLURM = {"SLURM_PROCID": "2", "SLURM_NTASKS": "6"}

# What is there when a source applies, beside its pair.
BESIDE = {"SLURM_PROCID": STEP}

by_pair = pytest.mark.parametrize(
    "source", job_ranks.RANK_VARIABLES, ids=lambda s: f"{s.rank}-{s.world_size}"
)


def environ_of(
    source: job_ranks.RankVariables, rank: str | None, world_size: str | None
) -> dict[str, str]:
    pair = {source.rank: rank, source.world_size: world_size}
    present = {name: value for name, value in pair.items() if value is not None}
    return {**BESIDE.get(source.rank, {}), **present}


# -- arguments, torch.distributed, environment, default --------------------------------------------


@pytest.fixture
def process_group() -> Iterator[None]:
    """A world of one, without a file or a port."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_arguments_beat_the_environment_which_beats_the_default() -> None:
    assert job_ranks.find_rank(1, 2, TORCHRUN) == job_ranks.Rank(1, 2)
    assert job_ranks.find_rank(environ=TORCHRUN) == job_ranks.Rank(3, 4)
    assert job_ranks.find_rank(environ={}) == job_ranks.Rank(0, 1)
    assert job_ranks.find_rank_in({}) is None


def test_torch_distributed_beats_the_environment_and_loses_to_arguments(
    process_group: None,
) -> None:
    assert job_ranks.find_rank(environ=TORCHRUN) == job_ranks.Rank(0, 1)
    assert job_ranks.find_rank(environ={"RANK": "nonsense"}) == job_ranks.Rank(0, 1)
    assert job_ranks.find_rank(1, 2, TORCHRUN) == job_ranks.Rank(1, 2)


def test_the_environment_is_that_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TORCHRUN, "CACHE_ENDPOINT": "grpc://a:1"}.items():
        monkeypatch.setenv(name, value)
    assert job_ranks.find_rank() == job_ranks.Rank(3, 4)
    assert job_ranks.find_endpoint(None) == "grpc://a:1"


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0), (None, 2), (1, None)])
def test_arguments_that_do_not_fit_are_quoted(rank: int | None, world_size: int | None) -> None:
    with pytest.raises(ConfigError, match=rf"rank={rank} world_size={world_size}"):
        job_ranks.find_rank(rank, world_size, TORCHRUN)


# -- sources ---------------------------------------------------------------------------------------


def test_the_order_of_the_variables_is_the_documented_one() -> None:
    assert [(source.rank, source.world_size) for source in job_ranks.RANK_VARIABLES] == [
        ("RANK", "WORLD_SIZE"),
        ("PET_NODE_RANK", "PET_NNODES"),
        ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
        ("HOROVOD_RANK", "HOROVOD_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
        ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        ("SLURM_PROCID", "SLURM_NTASKS"),
    ]


XGBOOST = {"DMLC_TASK_ID": "1", "DMLC_NUM_WORKER": "2"}


@given(st.sampled_from(job_ranks.RANK_VARIABLES), st.integers(1, 2**31 - 1), st.data())
def test_every_pair_of_every_source_is_found(
    source: job_ranks.RankVariables, world_size: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, world_size - 1))
    environ = environ_of(source, str(rank), str(world_size))
    assert job_ranks.find_rank(environ=environ) == job_ranks.Rank(rank, world_size)


@given(st.data())
def test_the_first_source_wins_whatever_the_others_say(data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(job_ranks.RANK_VARIABLES) - 1))
    taken = {job_ranks.RANK_VARIABLES[first].rank, job_ranks.RANK_VARIABLES[first].world_size}
    environ = environ_of(job_ranks.RANK_VARIABLES[first], "1", "4")
    for source in job_ranks.RANK_VARIABLES[first + 1 :]:
        for name in {source.rank, source.world_size} - taken:
            value = data.draw(st.sampled_from([None, "", "0", "1", "2", "-1", "nonsense"]))
            if value is not None:
                environ[name] = value
    assert job_ranks.find_rank(environ=environ) == job_ranks.Rank(1, 4)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({**TORCHRUN, **OPEN_MPI}, job_ranks.Rank(3, 4)),
        # A process of torchrun in a pod of Kubeflow Trainer.
        ({**TORCHRUN, **TRAINER, "PET_NPROC_PER_NODE": "2"}, job_ranks.Rank(3, 4)),
        ({**TORCHRUN, **TRAINER, "PET_NPROC_PER_NODE": "auto"}, job_ranks.Rank(3, 4)),
        # torchrun started by srun, mpirun inside a Slurm job.
        ({**TORCHRUN, **SLURM, **STEP}, job_ranks.Rank(3, 4)),
        ({**OPEN_MPI, **SLURM, **STEP}, job_ranks.Rank(1, 2)),
        ({**TRAINER, **JAX}, job_ranks.Rank(1, 2)),
        ({**JAX, **OPEN_MPI}, job_ranks.Rank(5, 8)),
        ({**OPEN_MPI, **PMI}, job_ranks.Rank(1, 2)),
        ({**PMI, **SLURM, **STEP}, job_ranks.Rank(6, 7)),
    ],
)
def test_where_sources_disagree_the_first_one_wins(
    environ: dict[str, str], expected: job_ranks.Rank
) -> None:
    assert job_ranks.find_rank(environ=environ) == expected


BAD_PAIRS = [
    ("3", None), ("3", ""), (None, "4"), ("", "4"), ("x", "4"), ("1", "x"), ("1.0", "4"),
    ("0", "1:4"), ("4", "4"), ("5", "4"), ("-1", "4"), ("0", "0"), ("0", "-4"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "rank", "world_size"),
    [
        (source, rank, world_size)
        for source in job_ranks.RANK_VARIABLES
        for rank, world_size in BAD_PAIRS
        # Without it, SLURM_NTASKS goes with SLURM_PROCID.
        if world_size or source.world_size != "SLURM_STEP_NUM_TASKS"
    ],
    ids=lambda value: (
        value.world_size if isinstance(value, job_ranks.RankVariables) else repr(value)
    ),
)
def test_a_bad_pair_is_quoted_and_no_other_source_is_asked(
    source: job_ranks.RankVariables, rank: str | None, world_size: str | None
) -> None:
    later = {
        name: value
        for other in job_ranks.RANK_VARIABLES[job_ranks.RANK_VARIABLES.index(source) + 1 :]
        for name, value in environ_of(other, "1", "2").items()
        if name != source.rank
    }
    with pytest.raises(ConfigError) as caught:
        job_ranks.find_rank(environ={**later, **environ_of(source, rank, world_size)})
    for name, value in ((source.rank, rank), (source.world_size, world_size)):
        assert (f"{name} is not set" if value is None else f"{name}={value!r}") in str(caught.value)


@by_pair
def test_an_empty_pair_counts_as_absent(source: job_ranks.RankVariables) -> None:
    assert job_ranks.find_rank(environ=environ_of(source, "", "")) == job_ranks.Rank(0, 1)


def test_a_source_that_does_not_speak_leaves_it_to_the_next() -> None:
    assert job_ranks.find_rank(environ={"RANK": "", "WORLD_SIZE": "", **JAX}) == job_ranks.Rank(
        5, 8
    )


# -- nodes that are processes ----------------------------------------------------------------------


@pytest.mark.parametrize("one", [{}, {"PET_NPROC_PER_NODE": "1"}, {"PET_NPROC_PER_NODE": ""}])
def test_a_node_of_one_process_is_a_rank(one: dict[str, str]) -> None:
    assert job_ranks.find_rank(environ={**TRAINER, **one}) == job_ranks.Rank(1, 2)
    assert job_ranks.find_rank(environ=one) == job_ranks.Rank(0, 1)


@pytest.mark.parametrize("processes", ["8", "auto", "gpu", "cpu", "0", "-1", "many", " 1"])
@pytest.mark.parametrize("later", [{}, JAX, OPEN_MPI])
@pytest.mark.parametrize("nodes", [TRAINER, {"PET_NODE_RANK": "0", "PET_NNODES": "1"}, {}])
def test_several_processes_a_node_need_torchrun(
    processes: str, later: dict[str, str], nodes: dict[str, str]
) -> None:
    with pytest.raises(ConfigError, match="Start the program with torchrun") as caught:
        job_ranks.find_rank(environ={**later, **nodes, "PET_NPROC_PER_NODE": processes})
    for name, value in {**nodes, "PET_NPROC_PER_NODE": processes}.items():
        assert f"{name}={value!r}" in str(caught.value)


# -- Slurm -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param({"SLURM_NTASKS": "8"}, id="shell of salloc on the login node"),
        pytest.param({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, id="batch script"),
        pytest.param(
            {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_STEP_ID": str(0xFFFFFFFB)},
            id="batch script by its step",
        ),
        pytest.param(
            {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_STEP_ID": str(0xFFFFFFFA),
             "SLURM_STEP_NUM_TASKS": "8"},
            id="shell of salloc on a compute node",
        ),
        pytest.param({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8"}, id="no step"),
        pytest.param({**SLURM, "SLURM_STEP_ID": ""}, id="an empty step"),
        pytest.param(STEP, id="nothing but a step"),
    ],
)  # fmt: skip
def test_slurm_variables_do_not_apply_without_srun(environ: dict[str, str]) -> None:
    assert job_ranks.find_rank(environ=environ) == job_ranks.Rank(0, 1)


def test_the_tasks_of_the_step_count_and_not_those_of_the_job() -> None:
    step = {**STEP, "SLURM_STEP_NUM_TASKS": "3"}
    assert job_ranks.find_rank(environ={**SLURM, **step}) == job_ranks.Rank(2, 3)
    assert job_ranks.find_rank(
        environ={**SLURM, **STEP, "SLURM_STEP_NUM_TASKS": ""}
    ) == job_ranks.Rank(2, 6)


def test_a_step_that_is_no_number_is_quoted() -> None:
    with pytest.raises(ConfigError, match="SLURM_STEP_ID must be a number, got 'batch'"):
        job_ranks.find_rank(environ={**SLURM, "SLURM_STEP_ID": "batch"})


# -- endpoint --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "environ", "expected"),
    [
        ("grpc://a:1", {"CACHE_ENDPOINT": "grpc://b:2", "TRAIN_JOB_NAME": "j"}, "grpc://a:1"),
        (None, {"CACHE_ENDPOINT": "grpc://b:2", "TRAIN_JOB_NAME": "j"}, "grpc://b:2"),
        ("", {"CACHE_ENDPOINT": "grpc://b:2"}, "grpc://b:2"),
        # What comes later is not looked at.
        ("grpc://a:1", {"CACHE_ENDPOINT": "b", "TRAIN_JOB_NAME": "No"}, "grpc://a:1"),
        (None, {"CACHE_ENDPOINT": "grpc://b:2", "TRAIN_JOB_NAME": "No"}, "grpc://b:2"),
        (None, {"TRAIN_JOB_NAME": "job-1"}, "grpc://job-1-dataset-initializer-0-0.job-1:50051"),
        (None, {"CACHE_ENDPOINT": "", "TRAIN_JOB_NAME": "j"},
         "grpc://j-dataset-initializer-0-0.j:50051"),
        ("grpc+tcp://cache.prod.svc:65535", {}, "grpc+tcp://cache.prod.svc:65535"),
        ("grpc://[::1]:50051/", {}, "grpc://[::1]:50051/"),
    ],
)  # fmt: skip
def test_an_endpoint_is_the_argument_the_environment_or_that_of_the_train_job(
    argument: str | None, environ: dict[str, str], expected: str
) -> None:
    assert job_ranks.find_endpoint(argument, environ) == expected


@pytest.mark.parametrize("environ", [{}, {"CACHE_ENDPOINT": "", "TRAIN_JOB_NAME": ""}, TORCHRUN])
def test_a_missing_endpoint_is_an_error_that_names_all_three_ways(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        job_ranks.find_endpoint(None, environ)
    for words in ("cache='grpc://HOST:PORT'", "CACHE_ENDPOINT", "TRAIN_JOB_NAME"):
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "value",
    ["eighty", "host:50051", "http://host:50051", "grpc://", "grpc://host", "grpc://host:",
     "grpc://:50051", "grpc://host:port", "grpc://host:0", "grpc://host:65536", "grpc://host:1 ",
     "grpc://host:1\n", "grpc://a b:1", "grpc://host:1/path", "grpc://user@host:1",
     "grpc://::1:50051"],
)  # fmt: skip
def test_a_bad_endpoint_is_quoted_with_where_it_comes_from(value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        job_ranks.find_endpoint(value, {"CACHE_ENDPOINT": "grpc://b:2"})
    assert str(caught.value) == f"endpoint must be grpc://HOST:PORT, got {value!r}"
    with pytest.raises(ConfigError) as caught:
        job_ranks.find_endpoint(None, {"CACHE_ENDPOINT": value, "TRAIN_JOB_NAME": "job"})
    assert str(caught.value) == f"CACHE_ENDPOINT must be grpc://HOST:PORT, got {value!r}"


def test_an_endpoint_may_have_tls() -> None:
    assert job_ranks.find_endpoint("grpc+tls://host:1", {}) == "grpc+tls://host:1"


def test_credentials_are_the_arguments_else_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("of-a-file\n")
    environ = {"CACHE_TOKEN": "of-the-environment", "CACHE_TLS_CA": str(file)}

    def token(environ: dict[str, str], **given: Any) -> str | None:
        return job_ranks.find_credentials("grpc://host:1", environ=environ, **given).current_token()

    assert token({}) is None
    assert token(environ) == "of-the-environment"
    assert token(environ, token="given") == "given"
    assert token(environ, token_file=file) == "of-a-file"
    assert token({"CACHE_TOKEN_FILE": str(file)}, token="given") == "given"
    assert job_ranks.find_credentials("grpc://host:1", environ=environ).tls_ca == str(file)
    shown = repr(job_ranks.find_credentials("grpc://host:1", environ=environ))
    assert "of-the-environment" not in shown


@pytest.mark.parametrize("name", ["Job", "1job", "-job", "job-", "a.b", "a b", "job\n", "a" * 64])
def test_a_bad_name_of_a_train_job_is_quoted(name: str) -> None:
    with pytest.raises(ConfigError, match="TRAIN_JOB_NAME") as caught:
        job_ranks.find_endpoint(None, {"TRAIN_JOB_NAME": name})
    assert repr(name) in str(caught.value)


# -- libraries that are initialised --------------------------------------------------------------


def test_jax_is_asked_once_it_is_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(client=None, process_id=0, num_processes=1)
    monkeypatch.setitem(
        sys.modules,
        "jax._src.distributed",
        SimpleNamespace(global_state=state),  # type: ignore
    )
    assert job_ranks.find_rank(environ=JAX) == job_ranks.Rank(5, 8)
    state.client, state.process_id, state.num_processes = object(), 1, 2
    assert job_ranks.find_rank(environ=JAX) == job_ranks.Rank(1, 2)


def test_torch_xla_is_asked_in_the_processes_that_it_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices = 0
    library = SimpleNamespace(
        _XLAC=SimpleNamespace(_xla_get_replication_devices_count=lambda: devices)
    )
    runtime = SimpleNamespace(global_ordinal=lambda: 3, world_size=lambda: 4)
    monkeypatch.setitem(sys.modules, "torch_xla", library)  # type: ignore
    monkeypatch.setitem(sys.modules, "torch_xla.runtime", runtime)  # type: ignore
    assert job_ranks.find_rank(environ={}) == job_ranks.Rank(0, 1)
    devices = 4
    assert job_ranks.find_rank(environ={}) == job_ranks.Rank(3, 4)


def test_xgboost_is_asked_once_its_workers_are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    connected = False
    collective = SimpleNamespace(
        is_distributed=lambda: connected, get_rank=lambda: 1, get_world_size=lambda: 2
    )
    monkeypatch.setitem(sys.modules, "xgboost.collective", collective)  # type: ignore
    assert job_ranks.find_rank(environ={}) == job_ranks.Rank(0, 1)
    connected = True
    assert job_ranks.find_rank(environ=XGBOOST) == job_ranks.Rank(1, 2)


def test_the_variables_of_xgboost_alone_are_no_rank() -> None:
    assert job_ranks.find_rank(environ={**XGBOOST, "DMLC_NUM_WORKER": "1"}) == job_ranks.Rank(0, 1)
    assert job_ranks.find_rank(environ={**XGBOOST, **JAX}) == job_ranks.Rank(5, 8)
    with pytest.raises(ConfigError, match=r"DMLC_NUM_WORKER='2', DMLC_TASK_ID='1'.*Communicator"):
        job_ranks.find_rank(environ=XGBOOST)


MESHES = """
import json, sys, warnings
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from cache_client.job.parallel_groups import model_parallel_dimensions, rank_in_group, rank_in_mesh
from cache_protocol.errors import ConfigError
warnings.simplefilter("ignore")
found = []
for rank in range(8):
    dist.init_process_group("fake", rank=rank, world_size=8, store=FakeStore())
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    ranks = [rank_in_mesh(mesh), rank_in_mesh(mesh["dp_shard"])]
    ranks.append(rank_in_group(mesh.get_group("tp")))
    try:
        rank_in_mesh(init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "x")))
    except ConfigError as error:
        refused = str(error)
    found.append([[[r.rank, r.world_size] for r in ranks], model_parallel_dimensions(), refused])
    dist.destroy_process_group()
print(json.dumps(found))
"""


@pytest.mark.unversioned
def test_the_data_parallel_rank_is_found_in_meshes_and_groups() -> None:
    done = forked_python.run(
        [sys.executable, "-c", MESHES], capture_output=True, text=True, timeout=100, check=True
    )
    for rank, (ranks, dimensions, refused) in enumerate(json.loads(done.stdout)):
        assert ranks == [[rank // 2, 4], [rank // 2 % 2, 2], [rank % 2, 2]]
        assert dimensions == ["tp"]
        assert "data_parallel has 'x'" in refused and "data_parallel=mesh['dp']" in refused


@pytest.mark.parametrize(
    ("value", "find"), [("dp", parallel_groups.rank_in_mesh), (7, parallel_groups.rank_in_group)]
)
def test_what_is_no_mesh_and_no_group_is_refused(value: object, find: Any) -> None:
    with pytest.raises(ConfigError, match="data_parallel must be"):
        find(value)


@pytest.mark.parametrize(
    ("given", "deadline_s"), [(None, 60.0), ("", 60.0), ("7200", 7200.0), ("5", 60.0)]
)
def test_a_runtime_may_give_a_load_more_time(given: str | None, deadline_s: float) -> None:
    environ = {} if given is None else {"CACHE_READY_DEADLINE_S": given}
    assert job_ranks.find_ready_deadline_s(60.0, environ) == deadline_s


@pytest.mark.parametrize("given", ["soon", "-1", "0", "nan", "inf"])
def test_a_deadline_that_is_no_number_of_seconds_is_quoted(given: str) -> None:
    with pytest.raises(ConfigError, match=rf"CACHE_READY_DEADLINE_S .*'{given}'"):
        job_ranks.find_ready_deadline_s(60.0, {"CACHE_READY_DEADLINE_S": given})


@pytest.mark.parametrize("text", ["where", "[1]", "1", "{"])
def test_a_view_of_the_environment_that_is_no_object_is_quoted(text: str) -> None:
    assert job_ranks.find_view_options({}) == job_ranks.find_view_options({"CACHE_VIEW": ""}) == {}
    with pytest.raises(ConfigError, match="CACHE_VIEW must be the options of a View as JSON"):
        job_ranks.find_view_options({"CACHE_VIEW": text})


# -- the job, and its processes --------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_ranks_that_meet_on_loopback_are_no_ranks_of_another_machine(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    meets = {"MASTER_ADDR": host, "MASTER_PORT": "29500"}
    monkeypatch.setattr(job_ranks.socket, "gethostname", lambda: "trainer-7")

    assert job_ranks.find_job(environ=meets) == "trainer-7:29500"
    assert job_ranks.find_job(environ={**meets, "MASTER_ADDR": "node-0"}) == "node-0:29500"
    assert not job_ranks.is_of_one_process("node-0:29500")
    assert job_ranks.is_of_one_process(job_ranks.find_job(environ={}))


@pytest.mark.parametrize(
    ("job", "environ", "attempt", "rank"),
    [
        ("train", {}, "", (0, 0)),
        ("train", TORCHRUN, "", (3, 4)),
        (
            "train",
            {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"},
            "TORCHELASTIC_RESTART_COUNT=2",
            (3, 4),
        ),
        ("slurm-5", {"SLURM_JOB_ID": "5", **SLURM, **STEP}, "SLURM_STEP_ID=0", (2, 6)),
        ("train", {"SLURM_JOB_ID": "5"}, "", (0, 0)),
        ("train", {"RANK": "1"}, "", (0, 0)),  # an argument says the rank
    ],
)
def test_a_process_says_what_its_launcher_says(
    job: str, environ: dict[str, str], attempt: str, rank: tuple[int, int]
) -> None:
    found = job_ranks.find_process(job, environ=environ)

    assert (found.attempt, (found.rank, found.num_processes)) == (attempt, rank)
    assert found == job_ranks.find_process(job, environ=environ)


def test_processes_that_a_batch_script_starts_are_runs_of_their_own() -> None:
    found = job_ranks.find_process("slurm-5", environ={"SLURM_JOB_ID": "5"})

    assert found.attempt == found.name
