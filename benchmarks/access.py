"""What do tokens cost a reader? The checks of an epoch, counted and timed, and epochs in pairs.

    python -m benchmarks.access [--quick]

The count does not depend on a busy machine: processor time of one check, times the checks of an
epoch, over the processor time of an epoch. The pairs do: the same node with and without tokens, in
turn, and the node without tokens twice, which is the noise.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from benchmarks.common import median_interval, memory_directory, write_result
from cache_client import CacheClient, CacheIterableDataset, Connection, DatasetSpec
from cache_server.auth.authenticator import Authenticator, Caller
from cache_server.local import LocalNode
from cache_server.rpc.stream_limits import StreamLimits
from tests.conftest import write_numbered

PRINCIPALS = 51
BATCH_SIZE = 1024
VERB = "flight DO_EXCHANGE"


def token(number: int) -> str:
    """Of a principal."""
    return f"the-token-of-{number}-" + "x" * 20


def write_tokens(path: Path) -> Path:
    """Writes a file of principals: a node, a writer and readers."""
    roles = ["node"], ["writer"], *(["reader"] for _ in range(PRINCIPALS - 2))
    principals = [
        {
            "name": str(number),
            "sha256": hashlib.sha256(token(number).encode()).hexdigest(),
            "roles": own,
        }
        for number, own in enumerate(roles)
    ]
    path.write_text(json.dumps({"principals": principals}), encoding="utf-8")
    return path


def cpu_ns(work: Callable[[], object], times: int) -> float:
    """Processor time of one call of ``work``, of this thread; the least of five series."""
    series = []
    for _ in range(5):
        start = time.thread_time_ns()
        for _ in range(times):
            work()
        series.append((time.thread_time_ns() - start) / times)
    return min(series)


def checks(tokens: Path) -> dict[str, float]:
    """Nanoseconds of each check."""
    authenticator, limits = Authenticator(tokens), StreamLimits(60.0)
    headers = {"authorization": f"Bearer {token(PRINCIPALS - 1)}"}
    caller = Caller(authenticator, VERB, headers, "")
    call = limits.begin("a", "b")
    messages = call.paced(iter(lambda: 1, 0), 2 << 20)
    return {
        "token_of_a_call_ns": cpu_ns(lambda: Caller(authenticator, VERB, headers, ""), 5_000),
        "limits_of_a_call_ns": cpu_ns(lambda: limits.begin("a", "c").end(), 5_000),
        "token_of_a_request_ns": cpu_ns(caller.still_allowed, 50_000),
        "limits_of_a_message_ns": cpu_ns(lambda: next(messages), 20_000),
    }


class Node:
    """A node and a reader of it."""

    def __init__(self, directory: Path, source: Path, tokens: Path | None) -> None:
        arguments = ["--allow-source", ""]
        if tokens is not None:
            arguments += ["--auth-tokens", str(tokens)]
        self.node = LocalNode(directory, arguments, None if tokens is None else token(0))
        self.node.start()
        self._token = None if tokens is None else token(2)
        writer = CacheClient(
            Connection(self.node.endpoint, token=None if tokens is None else token(1))
        )
        writer.load(DatasetSpec("t", source))

    def epoch(self, *, local: bool) -> tuple[float, Counter[str]]:
        """Processor seconds of node and reader for a shuffled epoch, and what was sent."""
        dataset = CacheIterableDataset(
            "t",
            batch_size=BATCH_SIZE,
            shuffle=True,
            cache=Connection(self.node.endpoint, local=local, token=self._token),
        )
        process = psutil.Process(self.node.pid)
        before, own = process.cpu_times(), time.process_time()
        with counted() as sent:
            rows = sum(len(batch["row"]) for batch in dataset)
        assert rows == dataset.num_samples
        after = process.cpu_times()
        spent = after.user + after.system - before.user - before.system
        return spent + time.process_time() - own, sent


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the calls and the requests of this process meanwhile."""
    from cache_client.flight.connections import NodeConnection
    from cache_client.flight.streams import GatherStream

    sent: Counter[str] = Counter()
    options, send, receive = NodeConnection._options, GatherStream.send, GatherStream.receive

    def count_call(*arguments: Any) -> Any:
        sent["calls"] += 1
        return options(*arguments)

    def count_request(*arguments: Any) -> None:
        sent["requests"] += 1
        send(*arguments)

    def count_messages(*arguments: Any) -> Any:
        batches = receive(*arguments)
        sent["messages"] += len(batches)
        return batches

    with (
        patch.object(NodeConnection, "_options", count_call),
        patch.object(GatherStream, "send", count_request),
        patch.object(GatherStream, "receive", count_messages),
    ):
        yield sent


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rows, in seconds")
    quick: bool = parser.parse_args().quick
    pairs, num_rows = (3, 100_000) if quick else (15, 1_000_000)
    with memory_directory("bench-access-") as directory, ExitStack() as stack:
        tokens = write_tokens(directory / "tokens.json")
        each = checks(tokens)
        source = write_numbered(directory / "source", num_rows, files=8)
        nodes = {
            name: Node(directory / name, source, tokens if name == "tokens" else None)
            for name in ("without", "again", "tokens")
        }
        for node in nodes.values():
            stack.callback(node.node.close)
        result: dict[str, Any] = {"rows": num_rows, "checks": each, "reads": {}}
        for local in (False, True):
            spent: dict[str, list[float]] = {name: [] for name in nodes}
            sent: Counter[str] = Counter()
            for number in range(pairs + 1):
                first = number % len(nodes)
                for name in (*[*nodes][first:], *[*nodes][:first]):
                    seconds, sent_now = nodes[name].epoch(local=local)
                    if number:  # the first one maps and connects
                        spent[name].append(seconds)
                        sent = sent_now if name == "tokens" else sent
            checked_ns = (
                sent["calls"] * (each["token_of_a_call_ns"] + each["limits_of_a_call_ns"])
                + sent["requests"] * each["token_of_a_request_ns"]
                + sent["messages"] * each["limits_of_a_message_ns"]
            )
            least_s = min(spent["without"])
            result["reads"]["local files" if local else "Flight"] = found = {
                **sent,
                "epoch_cpu_s": least_s,
                "checks_cpu_s": checked_ns / 1e9,
                "checks_percent": checked_ns / 1e7 / least_s,
                **{
                    f"{name}_percent": 100 * (statistics.median(
                        b / a for a, b in zip(spent["without"], spent[name], strict=True)
                    ) - 1)
                    for name in ("again", "tokens")
                },
                **{
                    f"{name}_percent_interval": [
                        100 * (end - 1) for end in median_interval(
                            [b / a for a, b in zip(spent["without"], spent[name], strict=True)]
                        )[:2]
                    ]
                    for name in ("again", "tokens")
                },
                **{
                    f"{name}_least_percent": 100 * (min(spent[name]) / least_s - 1)
                    for name in ("again", "tokens")
                },
            }  # fmt: skip
            print("local files" if local else "Flight", json.dumps(found, indent=1))
    path = write_result("access-quick" if quick else "access", result)
    print(f"{json.dumps(each, indent=1)}\n\nwritten to {path}")


if __name__ == "__main__":
    main()
