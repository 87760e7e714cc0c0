"""Reads audit records: from the states of checkpoints, and from what the cache kept."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cache_client.control.infos import JobInfo
from cache_client.order.audit_record import AuditRecord, Evidence
from cache_client.order.states import OrderState, read_state
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
    records = [AuditRecord.from_dict(record) for record in _audits_in(path)]
    if not records:
        raise ConfigError(
            f"no audit record in {path}: make the dataset with audit='states', and save the "
            "state of every rank"
        )
    return [Evidence(record, record.begun_s, record.made_s) for record in records]


def read_states(path: Path) -> list[OrderState]:
    """The states in a checkpoint; as `read_records`, and they need no audit record.

    Raises:
        ConfigError: the file cannot be read, or has no state; names it.
    """
    found = {json.dumps(each, default=str): each for each in _states_in(_content(path))}
    if not found:
        raise ConfigError(f"no state of a dataset in {path}: save what state_dict returns")
    try:
        return [read_state(_order(each)) for each in found.values()]
    except ValueError as error:
        raise ConfigError(f"bad state in {path}: {error}") from None


def _order(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a mixture's state that other states have, too."""
    return {name: each for name, each in state.items() if name != "mixture"}


def _audits_in(path: Path) -> list[Mapping[str, Any]]:
    return [each["audit"] for each in _states_in(_content(path)) if "audit" in each]


def _content(path: Path) -> Any:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    try:
        return json.loads(content)
    except ValueError:
        return _load_by_torch(path)


def _load_by_torch(path: Path) -> Any:
    try:
        import torch
    except ImportError as error:
        raise ConfigError(missing_package(error, "files of torch", "client")) from None
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{path} is neither JSON nor a file of torch.save: {reason}") from None


def _states_in(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        if "rows_consumed" in value and "fingerprint" in value:
            yield value
            return
        for each in value.values():
            yield from _states_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _states_in(each)
