"""What is said of a load: percent, time left, and how often."""

from __future__ import annotations

import pytest

from cache_protocol.v1 import cache_pb2 as pb
from cache_protocol.wire.load_progress import LoadMeter, LoadReport, OncePerSecond


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def progress(shards: int, of: int, rows: int = 0, estimated: int = 0) -> pb.LoadProgress:
    return pb.LoadProgress(
        shards_done=shards, shards_total=of, rows_done=rows, estimated_rows=estimated, bytes_done=7
    )


@pytest.mark.parametrize(
    ("given", "percent"),
    [
        (progress(0, 8), 0),
        (progress(2, 8), 25),
        (progress(2, 8, rows=300, estimated=1000), 30),  # two and a part of the third
        (progress(6, 8, rows=10, estimated=1000), 75),  # a filter
        (progress(7, 8, rows=1000, estimated=1000), 99),  # read, but not sealed
        (progress(8, 8, rows=10, estimated=1000), 100),
        (progress(0, 0, rows=500), None),  # a whole query
    ],
)
def test_the_percentage_is_never_too_high(given: pb.LoadProgress, percent: int | None) -> None:
    assert LoadMeter("t").read(given).percent == percent


def test_the_time_left_is_by_the_rate_since_the_first_look() -> None:
    clock = Clock()
    meter = LoadMeter("t", clock)
    assert meter.read(progress(4, 8)).remaining_s is None  # done before the first reading

    clock.now += 10
    assert meter.read(progress(6, 8)).remaining_s == pytest.approx(10)
    clock.now += 10
    assert meter.read(progress(6, 8)).remaining_s == pytest.approx(20)  # it slows down
    assert meter.read(progress(8, 8)).remaining_s == 0


def test_a_report_is_one_line_of_facts() -> None:
    clock = Clock()
    meter = LoadMeter("t", clock)
    unknown = str(meter.read(progress(0, 0, rows=5)))
    meter.read(progress(0, 8))
    clock.now += 1.2
    known = str(meter.read(progress(4, 8, rows=5)))

    assert unknown == "loading dataset=t rows=5 shards=0/? bytes=7 percent=? remaining_s=?"
    assert known == "loading dataset=t rows=5 shards=4/8 bytes=7 percent=50 remaining_s=1"


def test_why_a_load_waits_ends_its_line() -> None:
    given = progress(4, 8)
    given.waits = "shard 4 waits for room"

    assert str(LoadMeter("t").read(given)).endswith(" waits='shard 4 waits for room'")


def test_a_line_comes_each_second_and_at_the_end() -> None:
    clock = Clock()
    said: list[tuple[float, int | None]] = []

    def say(report: LoadReport) -> None:
        said.append((round(clock.now - 100, 2), report.percent))

    meter, each = LoadMeter("t", clock), OncePerSecond(say, clock=clock)
    for step in range(40):  # three seconds of readings, the last ten of them done
        clock.now = 100 + step * 0.075
        each(meter.read(progress(8 if step >= 30 else 1, 8)))

    assert [time for time, _ in said] == pytest.approx([0.0, 1.05, 2.02, 2.25], abs=0.01)
    assert [percent for _, percent in said] == [12, 12, 12, 100]
