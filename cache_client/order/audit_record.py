"""What one rank was given in one pass: the record that an audit is made of. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal

from cache_client.order.due import Due
from cache_client.order.order import EpochOrder, StepPlan, checked_shuffle
from cache_protocol.errors import ConfigError

AuditMode = Literal["off", "reports", "states"]
AUDIT_MODES: Final = ("off", "reports", "states")
AUDIT_FORMAT: Final = 1
# What records leave out that have none.
_RARE: Final = {"groups": (), "view": "", "amended_at": ()}


@dataclass(frozen=True, kw_only=True)
class AuditRecord:
    """What one rank was given in one pass over (the rest of) an epoch. Constant in size.

    Attributes:
        run: random name of the dataset object; ``number`` counts its passes.
        rows_consumed: of the epoch, by all ranks, before the pass.
        steps: that the training loop has taken.
        rows: in these steps.
        set_digest, order_digest: sums over the steps.
        checkpoints: pairs of steps and the ``order_digest`` after them, evenly spread.
        groups: as in `EpochOrder`; those that were known when the record was made.
        view: what was read other than each row once, see `cache_client.order.view_text`.
        due: what the epoch owes.
        job_shuffle: ``shuffle`` and ``shuffle_block_size`` of the job. Some views order rows by
            them, and then the order leaves slots as they are.
        begun_s, made_s: when the pass and the record were made, in seconds since 1970 by the clock
            of the rank.
        amended_at: positions where the epoch was amended before the pass, with skipped ones.
    """

    format: int = AUDIT_FORMAT
    run: str
    number: int
    dataset: str
    fingerprint: str
    num_rows: int
    seed: int
    shuffle: bool
    shuffle_block_size: int | None
    epoch: int
    rows_consumed: int
    rank: int
    world_size: int
    batch_size: int
    drop_last: bool
    pad: bool
    skipped: tuple[tuple[int, int], ...] = ()
    groups: tuple[int, ...] = ()
    view: str = ""
    due: Due
    job_shuffle: tuple[bool, int | None]
    begun_s: float = 0.0
    made_s: float = 0.0
    steps: int
    rows: int
    set_digest: int
    order_digest: int
    checkpoints: tuple[tuple[int, int], ...] = ()
    amended_at: tuple[int, ...] = ()

    @property
    def plan(self) -> StepPlan:
        """The steps of the pass."""
        return StepPlan(
            self.order.num_left,
            self.world_size,
            self.batch_size,
            drop_last=self.drop_last,
            pad=self.pad,
            rows_consumed=self.rows_consumed,
        )

    @property
    def order(self) -> EpochOrder:
        """The order of the epoch."""
        return EpochOrder(
            self.num_rows,
            shuffle=self.shuffle,
            shuffle_block_size=self.shuffle_block_size,
            seed=self.seed,
            epoch=self.epoch,
            skipped=self.skipped,
            groups=self.groups,
        )

    @property
    def ends(self) -> bool:
        """Whether all rows of the epoch were known: some are not while a version loads."""
        return not self.groups or self.due.of == self.num_rows

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON types."""
        pairs = ("checkpoints", "skipped")
        values = {**asdict(self), **{name: [*map(list, getattr(self, name))] for name in pairs}}
        values |= {"due": self.due.to_dict(), "job_shuffle": [*self.job_shuffle]}
        rare = {name: list(values.pop(name)) for name in ("groups", "amended_at")}
        rare["view"] = values.pop("view")
        return values | {name: value for name, value in rare.items() if value}

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> AuditRecord:
        """Reads what `to_dict` wrote.

        Raises:
            ConfigError: it is no such record, or one of another format; quotes it.
        """
        try:
            if mapping["format"] != AUDIT_FORMAT:
                raise ValueError(f"format must be {AUDIT_FORMAT}, got {mapping['format']!r}")
            mapping = {**_RARE, **mapping}
            values = {each.name: mapping[each.name] for each in fields(cls)}
            values["checkpoints"] = tuple((int(a), int(b)) for a, b in values["checkpoints"])
            values["skipped"] = tuple((int(a), int(b)) for a, b in values["skipped"])
            values["groups"] = tuple(map(int, values["groups"]))
            values["amended_at"] = tuple(map(int, values["amended_at"]))
            values["view"] = str(values["view"])
            values |= {name: float(values[name]) for name in ("begun_s", "made_s")}
            shuffle, block_size = values["job_shuffle"]
            values["job_shuffle"] = shuffle, checked_shuffle(shuffle, block_size)
            values["due"] = Due.from_dict(values["due"])
            record = cls(**values)
            record.plan, record.order  # noqa: B018  # checks the numbers
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"bad audit record: {error!r}") from None
        return record


@dataclass(frozen=True)
class Evidence:
    """A record, and when it was made.

    Attributes:
        begun_at, last_at: seconds; of the first and the last report. Equal for a state.
    """

    record: AuditRecord
    begun_at: float = 0.0
    last_at: float = 0.0
