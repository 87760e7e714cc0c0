"""Callers: their namespace, their roles, and the datasets that they see. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from cache_protocol.datasets.dataset_names import (
    DEFAULT_NAMESPACE,
    EVERY_NAMESPACE,
    full_name,
    joined,
    names_in,
    namespace_of,
)
from cache_protocol.errors import PermissionDeniedError


class Role(StrEnum):
    """What a principal may do.

    A reader reads, a writer also loads and drops the datasets of its namespace. An admin does both
    in every namespace. A node reports to the coordinator, gets secrets and copies shard files; it
    sees every namespace and changes none.
    """

    READER = "reader"
    WRITER = "writer"
    NODE = "node"
    ADMIN = "admin"


_INCLUDED = {
    Role.READER: {Role.READER},
    Role.WRITER: {Role.WRITER, Role.READER},
    Role.NODE: {Role.NODE, Role.READER},
    Role.ADMIN: {Role.ADMIN, Role.WRITER, Role.READER},
}


@dataclass(frozen=True)
class Viewer:
    """Which datasets a caller sees, and what it calls them.

    Attributes:
        namespace: of bare names.
        sees_all: the datasets of every namespace.
    """

    namespace: str = DEFAULT_NAMESPACE
    sees_all: bool = True

    def resolve(self, name: str) -> str:
        """The name inside the cache; of a mixture, those of its sources."""
        return joined(full_name(each, self.namespace) for each in names_in(name))

    def shown(self, full: str) -> str:
        """What this viewer calls a dataset: `resolve` makes the same name of it."""
        return joined(
            bare if namespace == self.namespace else f"{namespace}/{bare}"
            for each in names_in(full)
            for namespace, bare in [(namespace_of(each), each.rpartition("/")[2])]
        )

    def can_read(self, full: str, readers: Collection[str]) -> bool:
        """Whether it may read a dataset.

        Args:
            full: the name inside the cache.
            readers: the namespaces of the spec's ``readers``.
        """
        return (
            self.sees_all
            or namespace_of(full) == self.namespace
            or self.namespace in readers
            or (EVERY_NAMESPACE in readers and self != NOTHING)
        )


EVERYTHING = Viewer()
NOTHING = Viewer(namespace="", sees_all=False)
"""What a caller sees that nobody knows."""


@dataclass(frozen=True)
class Principal:
    """A caller that proved who it is.

    Attributes:
        name: in logs and errors; owns the datasets that it loads.
        instance: which of several processes with this name, such as a pod; empty: unknown.
        expires_at: Unix time at which its credentials end.
    """

    name: str
    namespace: str = DEFAULT_NAMESPACE
    roles: frozenset[Role] = frozenset()
    instance: str = ""
    expires_at: float = math.inf

    @cached_property
    def _granted(self) -> frozenset[Role]:
        return frozenset(role for given in self.roles for role in _INCLUDED[given])

    @cached_property
    def viewer(self) -> Viewer:
        """What it sees."""
        return Viewer(self.namespace, sees_all=bool(self.roles & {Role.ADMIN, Role.NODE}))

    @property
    def process(self) -> str:
        """Name and instance: a node id belongs to one of them."""
        return f"{self.name}/{self.instance}" if self.instance else self.name

    def require(self, role: Role, what: str) -> None:
        """Refuses a caller without a role.

        Raises:
            PermissionDeniedError: names the caller, the role and ``what`` needs it.
        """
        if role not in self._granted:
            roles = ", ".join(sorted(self.roles)) or "none"
            raise PermissionDeniedError(
                f"{what} needs the role {role}, and {self.name!r} has: {roles}"
            )

    def require_own(self, full: str, what: str) -> None:
        """Refuses a change of a dataset in another namespace.

        Raises:
            PermissionDeniedError: names the dataset and the caller.
        """
        if Role.ADMIN not in self.roles and namespace_of(full) != self.namespace:
            raise PermissionDeniedError(
                f"{what} of {full!r} needs a principal of its namespace or an admin, and "
                f"{self.name!r} is of {self.namespace!r}"
            )


ANYONE = Principal("anyone", roles=frozenset({Role.ADMIN, Role.NODE}))
"""Every caller of a cache without authentication."""
