"""The entries of the catalogue that cannot be read, and what callers see of their datasets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa

from cache_protocol.errors import LoadError, to_proto
from cache_protocol.v1 import cache_pb2 as pb
from cache_server.auth.principals import Viewer
from cache_server.shards.version_key import VersionKey


@dataclass(frozen=True)
class DamagedEntry:
    """One entry.

    Attributes:
        name: of its document now.
        reason: what is wrong with it.
    """

    name: str
    reason: str

    def error(self, shown: str) -> LoadError:
        """The error for who asks for its dataset.

        Args:
            shown: what the caller calls the dataset.
        """
        return LoadError(
            f"the catalogue entry of dataset {shown!r} is damaged: {self.reason}. The coordinator "
            f"set it aside as {self.name}, and the nodes keep the rows. Put the file back and "
            "start the coordinator again, or load or write the dataset again, or drop it"
        )


class DamagedEntries(dict[VersionKey, DamagedEntry]):
    """The damaged entries, by the version that the file's name tells. One thread at a time."""

    def of(self, dataset: str) -> DamagedEntry | None:
        """A damaged entry of a dataset."""
        return next((entry for key, entry in self.items() if key.dataset == dataset), None)

    def among(self, infos: Iterable[pb.DatasetInfo], viewer: Viewer) -> list[pb.DatasetInfo]:
        """Adds the damaged datasets of a viewer's namespace as failed ones, by name.

        Args:
            infos: one for each dataset that has another version.
        """
        infos_by_name = {}
        for key, entry in self.items():
            if viewer.can_read(key.dataset, ()):
                name = viewer.shown(key.dataset)
                infos_by_name[name] = pb.DatasetInfo(
                    spec=pb.DatasetSpec(name=name),
                    fingerprint=key.fingerprint,
                    state=pb.DATASET_STATE_FAILED,
                    schema=pa.schema([]).serialize().to_pybytes(),
                    error=to_proto(entry.error(name)),
                )
        infos_by_name |= {info.spec.name: info for info in infos}
        return [infos_by_name[name] for name in sorted(infos_by_name)]
