"""Records of the control plane have every field of their messages."""

from __future__ import annotations

from dataclasses import asdict, fields

import pytest

from cache_client.control import infos
from cache_protocol.v1 import cache_pb2 as pb


@pytest.mark.parametrize("name", ["JobInfo", "RankInfo", "NodeShare", "JobSample", "AuditEntry"])
def test_a_record_has_every_field_of_its_message(name: str) -> None:
    record, message = getattr(infos, name), getattr(pb, name)
    assert {each.name for each in fields(record)} == set(message.DESCRIPTOR.fields_by_name)


def test_a_job_is_a_record_through_and_through() -> None:
    message = pb.JobInfo(
        name="job",
        num_ranks=3,
        ranks=[pb.RankInfo(rank=2, wait_history=[0.5, 0.25])],
        audits=[pb.AuditEntry(run="r", record="{}", last_s=1.5)],
    )
    job = infos.job_info(message)
    assert (job.name, job.num_ranks, job.ranks[0].wait_history) == ("job", 3, (0.5, 0.25))
    assert asdict(job)["audits"] == ({"run": "r", "record": "{}", "begun_s": 0.0, "last_s": 1.5},)
