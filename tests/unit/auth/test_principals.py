"""Roles, namespaces and names, without a node."""

from __future__ import annotations

import pytest

from cache_protocol.datasets.dataset_names import full_name, namespace_of
from cache_protocol.errors import PermissionDeniedError
from cache_server.auth.principals import ANYONE, Principal, Role, Viewer

TEAM_A = Viewer("team-a", sees_all=False)
TEAM_B = Viewer("team-b", sees_all=False)


@pytest.mark.parametrize(
    ("name", "namespace", "full"),
    [
        ("t", "default", "t"),
        ("default/t", "default", "t"),
        ("default/t", "team-a", "t"),
        ("t", "team-a", "team-a/t"),
        ("team-a/t", "team-a", "team-a/t"),
        ("team-b/t", "team-a", "team-b/t"),
    ],
)
def test_every_viewer_finds_a_dataset_again_by_the_name_that_it_is_shown(
    name: str, namespace: str, full: str
) -> None:
    assert full_name(name, namespace) == full
    for viewer in (TEAM_A, TEAM_B, Viewer()):
        assert viewer.resolve(viewer.shown(full)) == full


def test_a_mixture_has_the_names_of_its_sources() -> None:
    assert TEAM_A.resolve("t+default/u+team-b/v") == "team-a/t+u+team-b/v"
    assert TEAM_A.shown("team-a/t+u+team-b/v") == "t+default/u+team-b/v"
    assert Viewer().resolve("t+12") == "t+12"


def test_a_dataset_is_read_by_its_namespace_its_readers_and_who_sees_all() -> None:
    assert namespace_of("team-a/t") == "team-a" and namespace_of("t") == "default"
    for readers, others in (((), False), (("team-b",), True), (("*",), True), (("c",), False)):
        assert TEAM_A.can_read("team-a/t", readers)
        assert Viewer().can_read("team-a/t", readers)
        assert TEAM_B.can_read("team-a/t", readers) is others


@pytest.mark.parametrize(
    ("role", "granted"),
    [
        (Role.READER, {Role.READER}),
        (Role.WRITER, {Role.READER, Role.WRITER}),
        (Role.NODE, {Role.READER, Role.NODE}),
        (Role.ADMIN, {Role.READER, Role.WRITER, Role.ADMIN}),
    ],
)
def test_a_role_grants_the_roles_that_it_includes_and_no_others(
    role: Role, granted: set[Role]
) -> None:
    principal = Principal("p", roles=frozenset({role}))
    for wanted in Role:
        if wanted in granted:
            principal.require(wanted, "a verb")
        else:
            with pytest.raises(PermissionDeniedError, match=f"a verb needs the role {wanted}"):
                principal.require(wanted, "a verb")


def test_only_an_admin_changes_a_dataset_of_another_namespace() -> None:
    writer = Principal("w", "team-a", frozenset({Role.WRITER}))
    writer.require_own("team-a/t", "a load")
    ANYONE.require_own("team-a/t", "a load")
    for other in ("t", "team-b/t"):
        with pytest.raises(PermissionDeniedError, match=other):
            writer.require_own(other, "a load")
    with pytest.raises(PermissionDeniedError, match="a drop of 'team-a/t'"):
        Principal("n", roles=frozenset({Role.NODE})).require_own("team-a/t", "a drop")
