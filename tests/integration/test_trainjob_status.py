"""Progress in the status of a TrainJob: posted to real servers, with and without TLS."""

from __future__ import annotations

import datetime
import ipaddress
import json
import logging
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from kubeflow_trainer_api.models import TrainerV1alpha1UpdateTrainJobStatusRequest

from cache_protocol.wire.load_progress import LoadReport
from cache_protocol.wire.trainjob_status import CA_CERT, TOKEN, URL, TrainJobStatus, status_of
from tests.waiting import wait_until

WAIT_S = 20.0
HALF = LoadReport("table", 400, 4, 8, 2**20, 50, 12.4)


class Receiver(ThreadingHTTPServer):
    """Keeps what is posted; answers with ``status``."""

    daemon_threads = True

    def __init__(self) -> None:
        self.posts: list[tuple[str, str, dict[str, Any]]] = []
        self.status = 200
        self.answers = threading.Event()  # posts hang until it is set
        self.answers.set()
        self.accepts = threading.Event()  # no connection is taken until it is set
        self.accepts.set()
        super().__init__(("127.0.0.1", 0), _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        self.accepts.wait(WAIT_S)
        return super().get_request()

    def percents(self) -> list[str]:
        return [
            metric["value"]
            for _, _, body in self.posts
            for metric in body["trainerStatus"]["metrics"]
            if metric["name"] == "cache_load_percent"
        ]


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        authorization = self.headers.get("Authorization", "")
        self.server.posts.append((self.path, authorization, body))
        self.server.answers.wait(WAIT_S)
        self.send_response(self.server.status)
        if self.server.status == 302:
            self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def receiver(tls: ssl.SSLContext | None = None) -> Iterator[tuple[Receiver, str]]:
    server = Receiver()
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        scheme = "http" if tls is None else "https"
        yield server, f"{scheme}://127.0.0.1:{server.server_address[1]}/apis/jobs/mine/status?a=b"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a trainer")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("tls")
    (folder / "ca.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return folder / "ca.crt", folder / "key"


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("hush-hush\n")
    return path


def test_a_report_fits_trainers_api_and_says_nothing_of_the_training() -> None:
    body = status_of(HALF, now_s=0.0)

    parsed = TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict(body)
    assert parsed is not None and parsed.trainer_status is not None
    status = parsed.trainer_status
    assert json.loads(json.dumps(parsed.to_dict(), default=str)).keys() == body.keys()
    assert status.progress_percentage == 0
    assert status.estimated_remaining_seconds is None
    assert status.last_updated_time == datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    assert {metric.name: metric.value for metric in status.metrics or []} == {
        "cache_load_percent": "50",
        "cache_load_remaining_seconds": "12",
        "cache_rows": "400",
        "cache_bytes": str(2**20),
        "cache_shards_done": "4",
        "cache_shards_total": "8",
    }


def test_unknown_values_are_left_out() -> None:
    body: Any = status_of(LoadReport("t", 5, 0, 0, 0, None, None))

    names = [metric["name"] for metric in body["trainerStatus"]["metrics"]]
    assert names == ["cache_rows", "cache_bytes", "cache_shards_done"]


def test_without_the_variable_of_the_server_nothing_is_posted() -> None:
    assert TrainJobStatus.from_env({CA_CERT: "/x", TOKEN: "/y", URL: ""}) is None


def test_reports_are_posted_over_tls_with_a_token_that_is_read_each_time(
    certificate: tuple[Path, Path], token: Path
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with receiver(context) as (server, url):
        environ = {URL: url, CA_CERT: str(certificate[0]), TOKEN: str(token)}
        status = TrainJobStatus.from_env(environ)
        assert status is not None
        with status:
            status.show(HALF)
            wait_until(lambda: server.posts, WAIT_S, "a post")
            token.write_text("another")
            status.show(HALF)

    assert [path for path, _, _ in server.posts] == ["/apis/jobs/mine/status?a=b"] * 2
    assert [given for _, given, _ in server.posts] == ["Bearer hush-hush", "Bearer another"]


def test_an_untrusted_server_gets_no_report(
    certificate: tuple[Path, Path], token: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with receiver(context) as (server, url), TrainJobStatus(url, token_file=token) as status:
        status.show(HALF)
        wait_until(lambda: "not posted" in caplog.text, WAIT_S, "a warning")

    assert server.posts == []
    assert "CERTIFICATE_VERIFY_FAILED" in caplog.text


def test_the_latest_reports_are_posted_and_always_the_last_one(token: Path) -> None:
    with receiver() as (server, url):
        with TrainJobStatus(url, token_file=token, interval_s=0.3) as status:
            for percent in range(100):
                status.show(LoadReport("t", percent, 0, 1, 0, percent, None))
            wait_until(lambda: server.posts, WAIT_S, "a post")
            status.show(LoadReport("t", 100, 1, 1, 0, 100, 0.0))
        percents = server.percents()

    assert len(percents) <= 3
    assert percents[-1] == "100"


@pytest.mark.parametrize(
    "fault", ["no server", "no token", "500", "302", "no address", "bad token"]
)
def test_a_failure_is_logged_once_without_the_token_and_harms_nothing(
    token: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    with receiver() as (server, url):
        if fault == "no server":
            with socket.create_server(("127.0.0.1", 0)) as gone:
                url = f"http://127.0.0.1:{gone.getsockname()[1]}"
        elif fault == "no token":
            token.unlink()
        elif fault == "no address":
            url = "somewhere"
        elif fault == "bad token":
            token.write_text("hush\nhush")
        else:
            server.status = int(fault)
        with (
            caplog.at_level(logging.DEBUG),
            TrainJobStatus(url, token_file=token, interval_s=0.01) as status,
        ):
            for _ in range(2):
                before = caplog.text.count("not posted")
                status.show(HALF)
                wait_until(
                    lambda before=before: caplog.text.count("not posted") > before, WAIT_S, "logged"
                )

    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "hush" not in caplog.text
    assert [path for path, _, _ in server.posts if path == "/elsewhere"] == []


def test_after_close_nothing_is_posted_though_a_post_hung_meanwhile(
    token: Path,
) -> None:
    with receiver() as (server, url):
        server.answers.clear()
        status = TrainJobStatus(url, token_file=token, interval_s=0.01, closing_s=0.05)
        status.show(HALF)
        wait_until(lambda: server.posts, WAIT_S, "a post that hangs")
        status.show(LoadReport("t", 100, 1, 1, 0, 100, 0.0))
        status.close()
        status.show(HALF)
        assert status._thread.is_alive()  # it hangs, and is not waited for
        server.answers.set()
        status._thread.join(WAIT_S)
        assert not status._thread.is_alive()
        assert server.percents() == ["50"]


def test_unsent_reports_are_dropped_at_close_though_the_server_comes_back(
    certificate: tuple[Path, Path], token: Path
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with receiver(context) as (server, url):
        server.accepts.clear()
        ca_file = certificate[0]
        status = TrainJobStatus(url, ca_file=ca_file, token_file=token, closing_s=0.2)
        status.show(HALF)
        status.close()
        assert status._thread.is_alive()  # it waits for a handshake
        server.accepts.set()
        status._thread.join(WAIT_S)
        assert not status._thread.is_alive()
        assert server.posts == []


def test_close_does_not_wait_for_a_server_that_hangs(token: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        status = TrainJobStatus(url, token_file=token, timeout_s=0.2)
        status.show(HALF)
        closing = threading.Thread(target=status.close)
        closing.start()
        closing.join(WAIT_S)
        assert not closing.is_alive()
