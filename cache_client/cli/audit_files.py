"""Reads audit records: from the states of checkpoints, and from what the cache kept."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cache_client.control.infos import JobInfo
from cache_client.order.audit_record import AuditRecord, Evidence
from cache_protocol.errors import ConfigError, missing_package


def evidence_of(job: JobInfo) -> list[Evidence]:
    """The records that readers of a job sent, with the times of their reports."""
    return [
        Evidence(AuditRecord.from_dict(json.loads(entry.record)), -entry.begun_s, -entry.last_s)
        for entry in job.audits
    ]


def read_records(path: Path) -> list[Evidence]:
    """The audit records in a checkpoint: a JSON file, or one that `torch.save` wrote.

    A state may be anywhere in it, also in a larger dict.

    Raises:
        ConfigError: the file cannot be read, or has no record; names it.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    try:
        found = json.loads(content)
    except ValueError:
        found = _load_by_torch(path)
    records = [AuditRecord.from_dict(record) for record in _records_in(found)]
    if not records:
        raise ConfigError(
            f"no audit record in {path}: make the dataset with audit='states', and save the "
            "state of every rank"
        )
    return [Evidence(record, record.begun_s, record.made_s) for record in records]


def _load_by_torch(path: Path) -> Any:
    try:
        import torch
    except ImportError as error:
        raise ConfigError(missing_package(error, "audit of torch files", "client")) from None
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{path} is neither JSON nor a file of torch.save: {reason}") from None


def _records_in(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        if isinstance(value.get("audit"), Mapping) and "rows_consumed" in value:
            yield value["audit"]
            return
        for each in value.values():
            yield from _records_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _records_in(each)
