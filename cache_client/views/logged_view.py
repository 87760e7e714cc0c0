"""The view of the first epoch of a version that loads. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from cache_client.load_log import LoadLog
from cache_client.permutation import Int64Array
from cache_client.views.view import Epochs, Samples


@dataclass(frozen=True)
class LoggedView:
    """Slot i has the i-th row of the log.

    Args:
        log: as far as it is known.
    """

    log: LoadLog
    num_bytes: int = 0
    orders_rows: bool = False
    epochs: Epochs = "same rows"
    rows_per_slot: float = 1.0

    @property
    def identity(self) -> str:
        """Names the log."""
        return f"log {self.log.log_id}"

    def num_slots(self, epoch: int) -> int:
        """Rows of the version; `UNKNOWN_ROWS` while that is not known."""
        return self.log.num_slots

    def samples(self, slots: Int64Array, epoch: int) -> Samples:
        """The rows of slots of known groups."""
        return Samples(self.log.numbers_by_shard(slots))
