"""Attacks on a real node with tokens. Others are in `test_lying_peers` and `test_slow_readers`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pyarrow.flight as flight
import pytest

from cache_client import CacheClient, CacheIterableDataset, Connection, DatasetSpec
from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.v1 import cache_pb2_grpc
from cache_server.coordination.members import membership
from cache_server.local import LocalNode
from tests.answering_control import answering_control
from tests.conftest import write_numbered
from tests.flight_clients import connect
from tests.waiting import suspend, wait_until

ROWS, FILES, WAIT_S = 2000, 4, 30.0


def token(role: str) -> str:
    return f"the-token-of-the-{role}"


@pytest.fixture(scope="module")
def control() -> Iterator[str]:
    """A control port that answers as every node."""
    with answering_control() as location:
        yield location


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalNode]:
    """A node with a token for each role, and the dataset ``t``."""
    directory = tmp_path_factory.mktemp("attacks")
    source = write_numbered(directory / "source", ROWS, files=FILES)
    principals = [
        {"name": role, "sha256": hashlib.sha256(token(role).encode()).hexdigest(), "roles": [role]}
        for role in ("node", "admin", "writer", "reader")
    ]
    digest = hashlib.sha256(token("stranger").encode()).hexdigest()
    stranger = {"name": "stranger", "sha256": digest, "namespace": "team-b", "roles": ["reader"]}
    principals.append(stranger)
    (directory / "tokens.json").write_text(json.dumps({"principals": principals}))
    arguments = ["--allow-source", "", "--auth-tokens", str(directory / "tokens.json")]
    arguments += ["--heartbeat-interval-s", "0.1"]
    running = LocalNode(directory / "node", arguments, token("node"))
    try:
        running.start()
        writer = CacheClient(Connection(running.endpoint, token=token("writer")))
        writer.load(DatasetSpec("t", source, target_shard_bytes=1))
        writer.load(DatasetSpec("shared", source, readers=("*",)))
        yield running
    finally:
        running.close()


def rows(node: LocalNode, *, local: bool = False) -> list[int]:
    dataset = CacheIterableDataset(
        "t",
        batch_size=100,
        cache=Connection(node.endpoint, local=local, token=token("reader")),
        columns=["row"],
    )
    return [row for batch in dataset for row in batch["row"].tolist()]


def heartbeat(node: LocalNode, report: pb.HeartbeatRequest, given: str) -> grpc.StatusCode:
    """How the coordinator answers a heartbeat."""
    with grpc.insecure_channel(node.control_location) as channel:
        metadata = [("authorization", f"Bearer {given}")] if given else []
        try:
            cache_pb2_grpc.CoordinatorStub(channel).Heartbeat(
                report, timeout=WAIT_S, metadata=metadata
            )
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return grpc.StatusCode.OK


def false_node(**fields: str) -> pb.HeartbeatRequest:
    of = {"id": "false", "flight_location": "grpc://127.0.0.1:1", "cache_dir": "/nowhere", **fields}
    return pb.HeartbeatRequest(node=pb.Node(process="one", **of))


def test_only_the_token_of_a_node_sends_heartbeats(node: LocalNode) -> None:
    for given in ("", "wrong"):
        assert heartbeat(node, false_node(), given) is grpc.StatusCode.UNAUTHENTICATED
    for role in ("reader", "writer", "admin"):
        assert heartbeat(node, false_node(), token(role)) is grpc.StatusCode.PERMISSION_DENIED


def test_heartbeats_of_a_stolen_token_stop_no_reader(node: LocalNode, control: str) -> None:
    admin = CacheClient(Connection(node.endpoint, token=token("admin")))
    info = admin.describe("t")
    lie = false_node(control_location=control)
    claim = lie.datasets.add(dataset="t", fingerprint=info.fingerprint, attempt=0)
    claim.shards.add(index=0, sealed=True, num_rows=1, checksum="x", rows_fixed=True)
    large = false_node(id="large", control_location=control)
    large.datasets.add(
        dataset="t", fingerprint="f00", failure="x" * (membership.MAX_HEARTBEAT_BYTES + 1)
    )
    for report, code in (
        (lie, grpc.StatusCode.OK),
        (
            false_node(id="r", cache_dir="relative", control_location=control),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (false_node(id="../x", control_location=control), grpc.StatusCode.INVALID_ARGUMENT),
        (
            false_node(id=node.node_id, control_location=control),
            grpc.StatusCode.PERMISSION_DENIED,
        ),
        (large, grpc.StatusCode.INVALID_ARGUMENT),
    ):
        assert heartbeat(node, report, token("node")) is code
        wait_until(lambda: admin.describe("t").state == "ready", WAIT_S, "ready")
        assert rows(node) == list(range(ROWS))
    assert {n.id for n in admin.nodes() if n.untrusted} == {"false"}


def test_a_file_that_is_cut_in_place_costs_no_row(node: LocalNode) -> None:
    process = psutil.Process(node.pid)
    (path, *_) = node.cache_dir.glob("t/*/shard-*.arrow")
    suspend(process)  # it looks for changed files only afterwards
    path.chmod(0o644)
    os.truncate(path, 0)
    process.resume()

    def is_whole() -> bool:
        if node.exit_code is not None:  # SIGBUS
            node.restart()
        return all(path.stat().st_size for path in node.cache_dir.glob("t/*/shard-*.arrow"))

    wait_until(lambda: is_whole() and rows(node) == list(range(ROWS)), WAIT_S, "every row")


def test_a_node_that_does_not_answer_at_its_address_takes_no_place(
    node: LocalNode, control: str, tmp_path: Path
) -> None:
    admin = CacheClient(Connection(node.endpoint, token=token("admin")))
    lives = {n.id for n in admin.nodes() if n.alive}
    for fields, code in (
        ({}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"control_location": "127.0.0.1:1"}, grpc.StatusCode.UNAVAILABLE),
        # Another node answers there.
        ({"control_location": node.control_location}, grpc.StatusCode.UNAVAILABLE),
        ({"control_location": node.endpoint.removeprefix("grpc://")}, grpc.StatusCode.UNAVAILABLE),
    ):
        for number in range(30):
            assert heartbeat(node, false_node(id=f"dead-{number}", **fields), token("node")) is code
    assert {n.id for n in admin.nodes() if n.alive} == lives

    for number in range(membership.MAX_MEMBERS_OF_HOST + 10):
        fake = false_node(id=f"fake-{number}", control_location=control)
        code = heartbeat(node, fake, token("node"))
        assert code in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert len(admin.nodes()) <= membership.MAX_MEMBERS_OF_HOST + 2
    arguments = ["--coordinator", node.control_location, "--bind", "127.0.0.2"]
    arguments += ["--auth-tokens", str(node.cache_dir.parent / "tokens.json")]
    honest = LocalNode(tmp_path / "honest", arguments, token("node"))
    try:
        honest.start()
        wait_until(
            lambda: honest.node_id in {n.id for n in admin.nodes() if n.alive}, WAIT_S, "it joins"
        )
    finally:
        honest.close()


def report(node: LocalNode, given: str, **fields: object) -> str:
    """Sends a report of a reader; returns why it was refused."""
    made = pb.ReaderReport(
        **{
            "job": "train", "dataset": "t", "fingerprint": "f", "world_size": 4, "run": "r",
            "step": 1, "batches": 1, "elapsed_s": 1.0, "expires_s": 600.0, **fields,
        }
    )  # fmt: skip
    with connect(node.endpoint, token(given)) as client:
        try:
            list(client.do_action(flight.Action("report", made.SerializeToString())))
        except flight.FlightError as error:
            return str(error)
    return ""


def jobs(node: LocalNode, given: str) -> dict[str, pb.JobInfo]:
    found = CacheClient(Connection(node.endpoint, token=token(given))).jobs(audits=True)
    return {job.name: job for job in found}


def test_a_reader_reports_only_of_datasets_that_it_may_read_and_into_no_job_of_others(
    node: LocalNode,
) -> None:
    audit = '{"format":1,"run":"r","number":1,"dataset":"t"}'
    assert not report(node, "reader", step=5, audit=audit)
    forged = {"epoch": 99, "rank": 3, "run": "forged", "audit": audit.replace("r", "f")}
    # Not there for it, though it is; and not there.
    for dataset in ("default/t", "default/nothing", "t", "nothing"):
        refusal = report(node, "stranger", dataset=dataset, **forged)
        assert f"no dataset {dataset!r}; datasets: default/shared" in refusal
    for claim in ({"namespace": "default"}, {"principal": "reader"}):
        assert not report(node, "stranger", dataset="default/shared", **forged, **claim)
    wait_until(lambda: "train" in jobs(node, "stranger"), WAIT_S, "its job is listed")

    (own,) = jobs(node, "stranger").values()
    assert (own.dataset, own.namespace, own.epoch) == ("default/shared", "team-b", 99)
    wait_until(lambda: "train" in jobs(node, "reader"), WAIT_S, "the job is listed")
    job = jobs(node, "reader")["train"]
    assert (job.step, job.epoch, job.num_ranks, [a.run for a in job.audits]) == (5, 0, 1, ["r"])
    assert {"train", "team-b/train"} <= jobs(node, "admin").keys()


@pytest.mark.parametrize("kind", ["job", "rank", "audit"])
def test_a_flood_of_reports_pushes_out_nothing_of_another_namespace(
    node: LocalNode, kind: str
) -> None:
    audit = '{"format":1,"run":"kept","number":1,"dataset":"t"}'
    assert not report(node, "reader", job=f"kept-{kind}", audit=audit)
    name = f"kept-{kind}"
    wait_until(lambda: name in jobs(node, "reader"), WAIT_S, "it is listed")
    made = pb.ReaderReport(
        job="flood", dataset="default/shared", fingerprint="f", world_size=10**6, run="r",
        expires_s=600.0,
    )  # fmt: skip
    with connect(node.endpoint, token("stranger")) as client:
        for number in range(600):
            if kind == "job":
                made.job = f"flood-{number}"
            elif kind == "rank":
                made.rank, made.run = number, f"run-{number}"
            else:
                made.audit = f'{number},"dataset"'.ljust(15_000)
            list(client.do_action(flight.Action("report", made.SerializeToString())))
    wait_until(lambda: jobs(node, "stranger"), WAIT_S, "the flood has arrived")
    assert len(jobs(node, "stranger")) <= 128
    kept = jobs(node, "reader")[name]
    assert kept.live and [entry.run for entry in kept.audits] == ["r"]
    (named,) = CacheClient(Connection(node.endpoint, token=token("reader"))).jobs(name)
    assert named.num_ranks == 1
