"""Progress in the status of a TrainJob, against a server that takes it as Trainer's does."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from kubeflow_trainer_api.models.trainer_v1alpha1_update_train_job_status_request import (
    TrainerV1alpha1UpdateTrainJobStatusRequest as Request,
)

from cache_client import report_progress
from cache_client.job import progress
from cache_client.job.progress import Pace, Sender, StatusServer, trainer_status
from cache_client.job.progress_callbacks import lightning_progress, numbers, transformers_progress
from cache_protocol.errors import ConfigError
from tests.store_stubs import Served, self_signed
from tests.waiting import wait_until

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Trainer(BaseHTTPRequestHandler):
    """Takes statuses with the right token, within the limits of the resource."""

    taken: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        parsed = Request.from_dict(body)
        is_known = parsed is not None and parsed.to_dict().keys() == body.keys()
        is_right = self.headers["Authorization"] == "Bearer secret" and self.path == "/status"
        if is_known and is_right:
            self.taken.append(body["trainerStatus"])
        self.send_response(200 if is_known and is_right else 401)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def environ(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The variables of Trainer for a server of this process, whose statuses are in `Trainer`."""
    pem = self_signed(tmp_path / "server.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    (tmp_path / "token").write_text("secret\n")
    Trainer.taken = []
    with Served(Trainer, context) as url:
        yield {
            "KUBEFLOW_TRAINER_SERVER_URL": f"{url}/status",
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(pem),
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(tmp_path / "token"),
        }


@pytest.fixture
def in_train_job(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {**environ, "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(progress, "_senders", {})
    yield


def last_of(taken: list[dict[str, Any]], percent: int) -> dict[str, Any]:
    wait_until(
        lambda: bool(taken) and taken[-1]["progressPercentage"] == percent, 10.0, f"{percent} %"
    )
    return taken[-1]


def test_rank_0_shows_percent_time_left_and_metrics(in_train_job: None) -> None:
    assert report_progress(10, 40, {"loss": 0.25, "note": "x"})
    status = last_of(Trainer.taken, 25)
    expected = [{"name": "loss", "value": "0.25"}, {"name": "note", "value": "x"}]
    assert status["metrics"] == expected
    assert report_progress(40, 40)
    assert last_of(Trainer.taken, 100)["estimatedRemainingSeconds"] == 0


def test_other_ranks_and_processes_outside_a_train_job_are_silent(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_senders", {})
    assert not report_progress(1, 2)
    for name, value in {**environ, "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(progress, "_senders", {})
    assert not report_progress(1, 2)
    assert Trainer.taken == []


def test_the_last_report_is_sent_as_the_process_ends(environ: dict[str, str]) -> None:
    lines = "from cache_client import report_progress as r; [r(n, 10) for n in range(8)]"
    done = subprocess.run([sys.executable, "-c", lines], env={**os.environ, **environ}, check=True)
    assert done.returncode == 0
    assert Trainer.taken[-1]["progressPercentage"] == 70
    assert len(Trainer.taken) <= 2


def test_only_the_newest_report_is_sent_after_the_pause() -> None:
    taken: list[Any] = []
    sender = Sender(taken.append, every_s=60.0)
    for done in range(11):
        sender.take(done, 10, {})
    assert last_of(taken, 100)
    assert len(taken) <= 2


def test_a_server_that_takes_nothing_is_logged_once_and_fails_no_training(
    environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    Path(environ["KUBEFLOW_TRAINER_SERVER_TOKEN"]).write_text("wrong")
    server = StatusServer.from_env(environ)
    assert server is not None
    sender = Sender(server.post, every_s=0.0)
    for done in (1, 2):
        sender.take(done, 10, {})
        sender.flush()
    (record,) = caplog.records
    assert "HTTP Error 401" in record.getMessage()


def test_a_status_stays_within_the_limits_of_the_resource() -> None:
    metrics = {f"{n}{'x' * 100}": 1 / 3 for n in range(300)} | {"": 1.0, "empty": ""}
    status = trainer_status(7, 3, None, metrics, NOW)
    assert status["progressPercentage"] == 100
    assert "estimatedRemainingSeconds" not in status
    assert len(status["metrics"]) == 256
    assert {len(each["name"]) for each in status["metrics"]} == {64}
    assert {each["value"] for each in status["metrics"]} == {"0.333333"}


def test_the_time_left_follows_from_the_reports_of_this_process() -> None:
    pace = Pace()
    assert pace.seconds_left(100, 200, 0.0) is None  # resumed at 100
    assert pace.seconds_left(110, 200, 20.0) == 180
    assert pace.seconds_left(200, 200, 30.0) == 0


@pytest.mark.parametrize(("done", "total"), [(1, 0), (-1, 2), (float("nan"), 2), (1, float("inf"))])
def test_a_share_of_nothing_is_refused(done: float, total: float) -> None:
    with pytest.raises(ConfigError, match="done must be"):
        report_progress(done, total)


def test_values_that_are_no_numbers_are_no_metrics() -> None:
    assert numbers({"loss": "0.5", "name": "x", "many": [1, 2]}) == {"loss": 0.5}


@pytest.mark.frameworks
def test_the_trainer_of_transformers_reports_its_steps_and_losses(in_train_job: None) -> None:
    from transformers.trainer_callback import CallbackHandler, TrainerControl, TrainerState

    handler = CallbackHandler([transformers_progress()], None, None, None, None)
    state = TrainerState(global_step=3, max_steps=4)
    handler.on_log(None, state, TrainerControl(), {"loss": 0.5, "note": "text"})
    handler.on_step_end(None, state, TrainerControl())
    assert last_of(Trainer.taken, 75)["metrics"] == [{"name": "loss", "value": "0.5"}]


@pytest.mark.frameworks
@pytest.mark.filterwarnings("ignore")  # of Lightning, which warns of many things
def test_the_trainer_of_lightning_reports_its_steps_and_metrics(in_train_job: None) -> None:
    import lightning
    import torch

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(1, 1)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.line(batch).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[lightning_progress()],
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(4, 1)))
    assert [each["name"] for each in last_of(Trainer.taken, 100)["metrics"]] == ["loss"]
