"""Elastic jobs of torchrun: agents come and go, and each row is learned once in each epoch."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from cache_client import CacheClient, DatasetSpec
from tests import elastic_rank, forked_python
from tests.conftest import write_numbered
from tests.free_ports import free_port
from tests.waiting import wait_until

ROWS = 500
WAIT_S = 90.0
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "FORKED_PYTHON_IMPORTS": "torch._dynamo",
    # Else an agent that joins later waits in vain: see "Elastic jobs" in docs/frameworks.md.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
RENDEZVOUS = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=8"


class Agents:
    """Agents of one elastic job, as on machines of a cluster; they end with the context."""

    def __init__(self, folder: Path, *program: str) -> None:
        self._folder, self._program = folder, program
        self._endpoint = f"127.0.0.1:{free_port()}"
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        """Starts another one; the first has the meeting place."""
        number = len(self._started)
        launcher = [
            *("-m", "torch.distributed.run", "--nnodes", "1:4", "--nproc-per-node", "1"),
            *("--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "agents"),
            *("--rdzv-endpoint", self._endpoint, "--local-addr", "127.0.0.1"),
            *("--rdzv-conf", f"{RENDEZVOUS},is_host={int(number == 0)}"),
        ]
        with (self._folder / f"agent-{number}.log").open("wb") as log:
            agent = subprocess.Popen(
                [forked_python.executable(), *launcher, *self._program],
                env={**os.environ, **ENVIRONMENT},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._started.append(agent)
        return agent

    def logs(self) -> str:
        """What all of them and their ranks have printed."""
        return "".join(path.read_text() for path in sorted(self._folder.glob("agent-*.log")))

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *raised: object) -> None:
        for agent in self._started:
            agent.terminate()
        for agent in self._started:
            agent.wait(WAIT_S)


@pytest.mark.timeout(240)
def test_agents_join_and_leave_and_each_row_is_learned_once_an_epoch(
    client: CacheClient, dataset_name: str, tmp_path: Path
) -> None:
    client.load(DatasetSpec(dataset_name, write_numbered(tmp_path / "rows", ROWS)))
    script = str(elastic_rank.__file__)

    def steps() -> list[tuple[int, int]]:
        """The world and the rows of each step, also of those that were lost."""
        path = tmp_path / "steps"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_world(world: int) -> None:
        def all_done() -> bool:
            done = sum(of == world for of, _ in steps())
            return done >= elastic_rank.MOST_STEPS[world]

        wait_until(all_done, WAIT_S, f"the steps of {world} ranks")

    with Agents(tmp_path, script, client.endpoint, dataset_name, str(tmp_path)) as agents:
        first, second = agents.start(), agents.start()
        wait_for_world(2)
        third = agents.start()
        wait_for_world(3)
        for agent in (second, third):
            agent.terminate()
        (tmp_path / "alone").touch()
        assert first.wait(WAIT_S) == 0, agents.logs()

    saved = torch.load(tmp_path / "checkpoint.pt")
    assert saved["model"].tolist() == [elastic_rank.EPOCHS] * ROWS
    assert {world for world, _ in steps()} == {1, 2, 3}
    # Steps behind a checkpoint were lost with each restart, and done again.
    assert sum(learned for _, learned in steps()) > elastic_rank.EPOCHS * ROWS
