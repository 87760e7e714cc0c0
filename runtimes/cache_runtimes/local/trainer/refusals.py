"""What a cluster refuses, by who and which field. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cache_protocol.errors import ConfigError

SCHEMA_OF_TRAIN_JOB = "schema of the TrainJob"
WEBHOOK_OF_TRAIN_JOB = "webhook of the TrainJob"
SCHEMA_OF_JOB_SET = "schema of the JobSet"
WEBHOOK_OF_JOB_SET = "webhook of the JobSet"


@dataclass(frozen=True)
class Refusal:
    """One field that a cluster refuses."""

    by: str  # who refuses, such as WEBHOOK_OF_TRAIN_JOB
    field: str
    reason: str

    def __str__(self) -> str:
        return f"{self.field} {self.reason} ({self.by})"


class RefusedError(ConfigError):
    """A cluster would refuse the TrainJob, or the JobSet that Trainer makes of it.

    Attributes:
        refusals: each field with who refuses it, in the order of admission.
    """

    def __init__(self, refusals: Iterable[Refusal]) -> None:
        self.refusals = tuple(refusals)
        super().__init__(f"a cluster would refuse it: {'; '.join(map(str, self.refusals))}")


def by_trainer(field: str, reason: str) -> Refusal:
    """A refusal by the webhook of the TrainJob."""
    return Refusal(WEBHOOK_OF_TRAIN_JOB, field, reason)
