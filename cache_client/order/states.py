"""The position of a job in its order. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, NamedTuple

from cache_client.order.erased import Notes
from cache_client.order.order import checked_shuffle, set_integer
from cache_client.order.permutation import (
    ALGORITHM_VERSION,
    checked_integer,
)
from cache_protocol.errors import some_of

_OPTIONAL: Final = (
    *("audit", "skipped", "view", "amended", "erased", "notes", "replayed", "set_weights"),
)
REPLAYS: Final = ("", "shorter", "filled")
_LAST_EPOCH: Final = 2**63 - 1  # of a state: readers store it in 64 bits


class AmendedPart(NamedTuple):
    """What a job reads from a position on.

    Attributes:
        epoch, at: where it begins: the position counts skipped ones.
        num_rows: of its version.
        view: what it reads other than each row once, see `cache_client.order.view_text`.
        erased: the last act of erasing that it knows: it leaves out the rows of these acts.
    """

    epoch: int
    at: int
    num_rows: int
    view: str
    erased: int = 0


class SetUntil(NamedTuple):
    """Weights that training set until an epoch.

    Attributes:
        log: the dataset with what the ranks reported.
        epoch: the last one whose weights were set.
        digest: of them, and of all that were set before.
    """

    log: str
    epoch: int
    digest: str


def parts_of(parts: Sequence[AmendedPart], epoch: int) -> tuple[AmendedPart, ...]:
    """The segments of an epoch: what holds at its begin, and the amendments in its midst."""
    begun = [part for part in parts if (part.epoch, part.at) <= (epoch, 0)][-1]
    own = [part for part in parts if part.epoch == epoch and part.at]
    return (begun._replace(epoch=epoch, at=0), *own)


@dataclass(frozen=True, kw_only=True)
class OrderState:
    """The position of a job in its order; independent of ranks, batch size and workers.

    Args:
        dataset: name of the dataset.
        fingerprint: of the version that the row ids belong to.
        seed: any integer.
        epoch: of the next row, at least 0.
        shuffle: as in `EpochOrder`.
        shuffle_block_size: as in `EpochOrder`.
        rows_consumed: rows of this epoch that all ranks together have consumed.
        format: `ALGORITHM_VERSION` of the writer.
        audit: record of what the rank that wrote the state was given, see
            `cache_client.order.audit`; no part of the position.
        skipped: triples of epoch, start and stop: runs of positions that `skip_steps` leaves out.
            ``rows_consumed`` does not count them.
        view: what was read other than each row once, for people; the fingerprint tells it apart.
        amended: what the job read from its begin on, if it was amended; ascending, the first at
            position 0 of epoch 0.
        erased: the last act of erasing whose rows the order leaves out; 0: none.
        notes: what conditions said of rows that were erased later, see `cache_client.order.erased`.
        replayed: how a replay leaves rows out, ``shorter`` or ``filled``; empty: no replay.
        set_weights: the weights that training set, which the order reads by; None: none.

    Raises:
        ValueError: a field has a wrong type or value, or another ``format``; quotes it.

    Thread-safety: immutable.
    """

    format: int = ALGORITHM_VERSION
    dataset: str
    fingerprint: str
    seed: int
    epoch: int
    shuffle: bool
    shuffle_block_size: int | None
    rows_consumed: int
    audit: Mapping[str, Any] | None = field(default=None, compare=False)
    skipped: tuple[tuple[int, int, int], ...] = ()
    view: str = field(default="", compare=False)
    amended: tuple[AmendedPart, ...] = ()
    erased: int = 0
    notes: Notes = field(default_factory=dict, compare=False)
    replayed: str = ""
    set_weights: SetUntil | None = None

    def __post_init__(self) -> None:
        if set_integer(self, "format") != ALGORITHM_VERSION:
            raise ValueError(f"format must be {ALGORITHM_VERSION}, got {self.format}")
        for name in ("dataset", "fingerprint"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ValueError(f"{name} must be a non-empty string, got {value!r}")
        set_integer(self, "seed")
        set_integer(self, "epoch", 0, _LAST_EPOCH)
        block_size = checked_shuffle(self.shuffle, self.shuffle_block_size)
        object.__setattr__(self, "shuffle_block_size", block_size)
        set_integer(self, "rows_consumed", 0)
        if self.audit is not None and not isinstance(self.audit, Mapping):
            raise ValueError(f"audit must be a dict, got {self.audit!r}")
        object.__setattr__(self, "skipped", _skipped_runs(self.skipped))
        if not isinstance(self.view, str):
            raise ValueError(f"view must be a text, got {self.view!r}")
        object.__setattr__(self, "amended", tuple(self.amended))
        set_integer(self, "erased", 0)
        object.__setattr__(self, "notes", _notes(self.notes))
        if self.replayed not in REPLAYS:
            raise ValueError(f"replayed must be one of {REPLAYS}, got {self.replayed!r}")
        if self.set_weights is not None:
            object.__setattr__(self, "set_weights", set_until(self.set_weights))

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a dict of JSON types; without optional fields that are empty."""
        state = asdict(self) | {"skipped": [list(run) for run in self.skipped]}
        state["notes"] = {
            condition: [list(note) for note in notes.items()]
            for condition, notes in self.notes.items()
        }
        state["amended"] = self.amended and amended_to_dict(self.amended)
        state["set_weights"] = self.set_weights and list(self.set_weights)
        return {key: value for key, value in state.items() if value or key not in _OPTIONAL}

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> "OrderState":
        """Read what `to_dict` wrote.

        Raises:
            ValueError: not a mapping, unknown or missing keys, a wrong type or value, or another
                ``format``; quotes it.
        """
        if not isinstance(mapping, Mapping):
            raise ValueError(f"state must be a dict, got {mapping!r}")
        # First, because a state of another format may have other keys.
        if "format" in mapping and mapping["format"] != ALGORITHM_VERSION:
            raise ValueError(f"format must be {ALGORITHM_VERSION}, got {mapping['format']!r}")
        known = [each.name for each in fields(cls)]
        unknown = sorted(repr(key) for key in mapping if key not in known)
        if unknown:
            raise ValueError(f"state has unknown keys: {some_of(unknown)}")
        missing = [repr(name) for name in known if name not in (*mapping, *_OPTIONAL)]
        if missing:
            raise ValueError(f"state lacks keys: {', '.join(missing)}")
        amended = {"amended": amended_from_dict(mapping["amended"])} if "amended" in mapping else {}
        return cls(**{**mapping, **amended})


@dataclass(frozen=True, kw_only=True)
class WorkerState(OrderState):
    """The position of one of n DataLoader workers, which reads every n-th step.

    The states of n workers differ. Only the same number of workers with the same size of steps can
    resume them, so the state has both.

    Args:
        rows_per_step: rows of all ranks together in a full step.
        num_workers: of a rank, at least 1.

    Raises:
        ValueError: as `OrderState`.

    Thread-safety: immutable.
    """

    rows_per_step: int
    num_workers: int

    def __post_init__(self) -> None:
        super().__post_init__()
        set_integer(self, "rows_per_step", 1)
        set_integer(self, "num_workers", 1)


def read_state(mapping: Mapping[str, Any]) -> OrderState:
    """Read what `to_dict` of an `OrderState` or a `WorkerState` wrote.

    Raises:
        ValueError: as `OrderState.from_dict`.
    """
    if isinstance(mapping, Mapping) and {"rows_per_step", "num_workers"} & set(mapping):
        return WorkerState.from_dict(mapping)
    return OrderState.from_dict(mapping)


def set_until(value: object) -> SetUntil:
    """Read the weights that a state or the text of a view names.

    Raises:
        ValueError: it names none; quotes it.
    """
    try:
        given: Any = value
        log, epoch, digest = given
        return SetUntil(str(log), checked_integer("epoch", epoch, 0, _LAST_EPOCH), str(digest))
    except (TypeError, ValueError) as error:
        raise ValueError(f"set_weights must be a log, an epoch and a digest: {error}") from None


def amended_to_dict(parts: Sequence[AmendedPart]) -> dict[str, Any]:
    """What a job read, as JSON types; each view stands there once."""
    views = list(dict.fromkeys(part.view for part in parts))
    told = [[*part[:3], views.index(part.view), part.erased] for part in parts]
    return {"views": views, "parts": [part if part[4] else part[:4] for part in told]}


def amended_from_dict(value: object) -> tuple[AmendedPart, ...]:
    """Read what `amended_to_dict` wrote.

    Raises:
        ValueError: it is nothing of that kind; quotes it.
    """
    try:
        views = [str(view) for view in value["views"]]  # type: ignore[index]
        parts = tuple(
            AmendedPart(
                checked_integer("epoch", epoch, 0),
                checked_integer("at", at, 0),
                checked_integer("num_rows", num_rows, 0),
                views[checked_integer("view", view, 0, len(views) - 1)],
                *(checked_integer("erased", number, 0) for number in erased),
            )
            for epoch, at, num_rows, view, *erased in value["parts"]  # type: ignore[index]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"amended must be views and parts: {error}") from None
    ascending = [part[:2] for part in parts]
    if ascending[:1] != [(0, 0)] or ascending != sorted(set(ascending)):
        raise ValueError(f"amended must have ascending parts from epoch 0 on, got {ascending}")
    return parts


def _notes(notes: object) -> Notes:
    """Check the notes of a state."""
    given: Any = notes
    try:
        return {
            str(condition): {
                checked_integer("act", number, 0): str(text) for number, text in dict(each).items()
            }
            for condition, each in dict(given).items()
        }
    except (TypeError, ValueError) as error:
        raise ValueError(f"notes must map conditions to notes of acts: {error}") from None


def _skipped_runs(runs: object) -> tuple[tuple[int, int, int], ...]:
    """Check the skipped runs of a state."""
    try:
        found = [tuple(checked_integer("skipped", n, 0) for n in run) for run in runs]  # type: ignore[attr-defined]
    except TypeError:
        raise ValueError(f"skipped must be runs of positions, got {runs!r}") from None
    if any(len(run) != 3 or run[1] >= run[2] for run in found):
        raise ValueError(f"skipped must be triples of epoch, start and stop, got {runs!r}")
    return tuple((run[0], run[1], run[2]) for run in found)
