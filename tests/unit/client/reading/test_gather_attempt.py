"""`GatherAttempt`: every part is asked for once; what fails is left for the next attempt."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from cache_client.flight import routing
from cache_client.reading import local_shards, reader
from cache_protocol.errors import (
    CacheError,
    NodeUnavailableError,
    NotReadyError,
    RequestError,
    StaleVersionError,
)
from tests.fake_streams import FakeStream, FakeStreams, location, shard_map

NODES = [routing.NodeRef(f"node-{i}", location(i)) for i in range(3)]
HERE = routing.Part(None, np.array([6, 7]), np.array([90, 91]))


def part(node: int) -> routing.Part:
    return routing.Part(NODES[node], np.array([2 * node, 2 * node + 1]), np.array([10, 11]) * node)


class Files:
    """Files of this machine, which may be gone."""

    def __init__(self, error: CacheError | None = None) -> None:
        self.error = error

    def gather(self, row_ids: np.ndarray) -> list[pa.RecordBatch]:
        if self.error is not None:
            raise self.error
        return [pa.record_batch({"row": row_ids})]


class Asking:
    """An attempt, and what it reported.

    Args:
        streams: what opening a stream to each node gives.
    """

    def __init__(self, *streams: FakeStream | CacheError, files: Files | None = None) -> None:
        self.streams = FakeStreams(shard_map(3))
        self.streams.streams = {location(i): stream for i, stream in enumerate(streams)}
        self.failures: list[tuple[str, CacheError]] = []
        self.answered: list[str] = []
        self.attempt = reader.GatherAttempt(self.streams, files, self.on_answer, self.on_failure)

    def ask(self, parts: list[routing.Part]) -> None:
        self.attempt.send(parts)
        self.attempt.receive()

    def on_answer(self, node: routing.NodeRef) -> None:
        self.answered.append(node.id)

    def on_failure(self, node: routing.NodeRef, error: CacheError) -> str:
        self.failures.append((node.id, error))
        return str(error)


def test_every_part_is_answered_and_its_stream_given_back() -> None:
    asking = Asking(FakeStream(), FakeStream(), files=Files())
    asking.ask([part(0), HERE, part(1)])
    answers = asking.attempt.answers
    assert sorted(answer.positions.tolist() for answer in answers) == [[0, 1], [2, 3], [6, 7]]
    assert all(sum(batch.num_rows for batch in answer.batches) == 2 for answer in answers)
    assert asking.attempt.failed == [] and asking.attempt.last_error == ""
    assert asking.answered == ["node-0", "node-1"]
    assert asking.streams.given_back == [location(0), location(1)]
    assert asking.streams.discarded == []


@pytest.mark.parametrize("error", [NotReadyError("loading"), StaleVersionError("unknown here")])
def test_the_parts_of_nodes_that_fail_are_left_and_the_others_answered(error: CacheError) -> None:
    broken = FakeStream(error)
    asking = Asking(FakeStream(), broken, error)
    asking.ask([part(0), part(1), part(2)])
    assert [each.node for each in asking.attempt.failed] == [NODES[2], NODES[1]]
    assert asking.failures == [("node-2", error), ("node-1", error)]
    assert asking.attempt.last_error == str(error)
    assert asking.answered == ["node-0"]
    assert asking.streams.discarded == [broken]


def test_only_the_node_that_times_out_first_is_blamed() -> None:
    timed_out, late = NodeUnavailableError("timed out"), NodeUnavailableError("late")
    asking = Asking(timed_out, FakeStream(late))
    asking.ask([part(0), part(1)])
    assert asking.failures == [("node-0", timed_out)]
    assert [each.node for each in asking.attempt.failed] == NODES[:2]
    assert asking.attempt.last_error == "timed out"

    asking = Asking(FakeStream(timed_out), FakeStream(late))
    asking.ask([part(0), part(1)])
    assert asking.failures == [("node-0", timed_out)]


@pytest.mark.parametrize("where", ["opening", "receiving"])
def test_a_request_that_is_refused_for_good_is_raised_and_no_stream_is_kept(where: str) -> None:
    refusal = RequestError("no such column")
    good = FakeStream()
    refused = FakeStream(refusal)
    asking = Asking(refusal if where == "opening" else refused, good)
    with pytest.raises(RequestError, match="no such column"):
        asking.ask([part(0), part(1)])
    left = {good} if where == "opening" else {good, refused}
    assert set(asking.streams.discarded) == left and asking.answered == []


def test_rows_of_a_file_that_is_lost_are_left_and_no_node_is_blamed() -> None:
    asking = Asking(
        FakeStream(), files=Files(local_shards.ShardFileLostError("cannot read shard-00003.arrow"))
    )
    asking.ask([HERE, part(0)])
    assert asking.attempt.failed == [HERE] and asking.failures == []
    assert asking.attempt.last_error == "cannot read shard-00003.arrow"
    assert asking.answered == ["node-0"]


class SlowStream(FakeStream):
    """A stream that comes to its end when it has brought some of the rows."""

    def receive(self, num_rows: int) -> list[pa.RecordBatch]:
        return super().receive(num_rows // 2)


def test_what_a_slow_node_brought_is_kept_and_the_rest_left_for_the_next_attempt() -> None:
    asking = Asking(SlowStream(), FakeStream())
    whole = routing.Part(NODES[0], None, np.array([40, 30, 20, 10]))

    asking.ask([whole])

    (answer,) = asking.attempt.answers
    assert answer.positions.tolist() == [0, 1]
    (left,) = asking.attempt.failed
    assert (left.positions.tolist(), left.row_ids.tolist()) == ([2, 3], [20, 10])
    assert asking.failures == [] and asking.attempt.last_error == ""
    assert len(asking.streams.discarded) == 1 and asking.streams.given_back == []
