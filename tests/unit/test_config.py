import socket
from pathlib import Path
from typing import Any

import pytest

from cache_protocol.errors import ConfigError
from cache_server import setting_options
from cache_server.auth.namespace_shares import NamespaceShare
from cache_server.config import NodeConfig


def config(**values: Any) -> NodeConfig:
    return NodeConfig.build(**{"cache_dir": "/cache", **values})


def problem_of(**values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config(**values)
    return str(caught.value)


@pytest.mark.parametrize(
    ("setting", "bad"),
    [
        ("flight_port", "eighty"),
        ("flight_port", -1),
        ("flight_port", 65_536),
        ("control_port", 65_536),
        ("control_port", None),
        ("control_port", 1.5),
        ("memory_limit_bytes", "much"),
        ("memory_limit_bytes", 0),
        ("memory_limit_bytes", -1),
        ("load_threads", 0),
        ("heartbeat_interval_s", 0),
        ("heartbeat_interval_s", float("inf")),
        ("node_timeout_s", -1.0),
        ("node_timeout_s", float("nan")),
        ("drain_timeout_s", "soon"),
        ("cache_dir", 7),
        ("cache_dir", ""),
        ("bind", ""),
        ("advertise", ""),
        ("num_nodes", 0),
        ("num_nodes", 1.5),
        ("join_timeout_s", 0),
        ("lease_s", -1),
        ("container_memory_limit_bytes", 0),
    ],
)
def test_a_bad_setting_is_named_and_quoted_once(setting: str, bad: object) -> None:
    problem = problem_of(**{setting: bad})

    assert problem.startswith(f"{setting} must be a")
    assert problem.count(f"got {bad!r}") == 1


@pytest.mark.parametrize("setting", ["bind", "advertise"])
@pytest.mark.parametrize("bad", ["node-0:50051", "grpc://node-0", "a b", "[node-0]", "[::1]:1"])
def test_a_host_has_neither_scheme_nor_port(setting: str, bad: str) -> None:
    assert f"{setting} must be a host name or address without a port" in problem_of(
        **{setting: bad}
    )


@pytest.mark.parametrize("good", ["node-0", "10.0.0.1", "::", "::1", "[::1]", "fe80::1%eth0"])
def test_a_host_is_a_name_or_an_address(good: str) -> None:
    assert config(bind=good, advertise=good).advertise == good


def test_every_bad_setting_is_quoted_at_once() -> None:
    bad = {
        "flight_port": "eighty",
        "control_port": 70_000,
        "coordinator": "somewhere",
        "memory_limit_bytes": "big",
        "load_threads": -3,
        "node_timeout_s": 0,
        "colour": "red",
    }

    problem = problem_of(**bad)

    for setting, value in bad.items():
        assert setting in problem
        assert f"got {value!r}" in problem


def test_a_missing_cache_dir_is_named() -> None:
    with pytest.raises(ConfigError, match="cache_dir is missing"):
        NodeConfig.build()


@pytest.mark.parametrize("port", [0, 1, 50_051, 65_535])
def test_every_port_of_tcp_and_zero_are_ports(port: int) -> None:
    settings = config(flight_port=port, control_port=port)

    assert (settings.flight_port, settings.control_port) == (port, port)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("node-0:50052", "node-0:50052"),
        ("grpc://node-0:50052", "node-0:50052"),
        ("10.0.0.1:1", "10.0.0.1:1"),
        ("cache-0.cache.default.svc:65535", "cache-0.cache.default.svc:65535"),
        ("[::1]:50052", "[::1]:50052"),
        (None, None),
    ],
)
def test_a_coordinator_is_a_host_and_a_port(given: str | None, kept: str | None) -> None:
    assert config(coordinator=given).coordinator == kept


@pytest.mark.parametrize(
    "bad",
    [
        *("", "node-0", ":50052", "node-0:", "node-0:0", "node-0:65536", "node-0:x", 50_052),
        *("http://node-0:1", "::1:50052", "a b:1", "node-0:1/path"),
    ],
)
def test_anything_else_is_no_coordinator(bad: object) -> None:
    assert "coordinator must be HOST:PORT" in problem_of(coordinator=bad)
    assert f"got {bad!r}" in problem_of(coordinator=bad)


@pytest.mark.parametrize(
    ("limit", "size"), [(1, 1), ("8GiB", 8 * 1024**3), ("512 MB", 512_000_000), (None, None)]
)
def test_the_memory_limit_takes_units(limit: object, size: int | None) -> None:
    assert config(memory_limit_bytes=limit).memory_limit_bytes == size


def test_a_string_becomes_the_type_of_its_setting() -> None:
    settings = config(cache_dir="/c", flight_port="0", load_threads="3", node_timeout_s="1.5")

    assert settings.cache_dir == Path("/c")
    assert (settings.flight_port, settings.load_threads, settings.node_timeout_s) == (0, 3, 1.5)


@pytest.mark.parametrize(
    ("bind", "advertise", "host"),
    [
        ("127.0.0.1", None, "127.0.0.1"),
        ("cache-0", None, "cache-0"),
        ("0.0.0.0", "cache-0.svc", "cache-0.svc"),
        ("0.0.0.0", None, "cache-0.example.org"),
        ("::", None, "cache-0.example.org"),
    ],
)
def test_others_are_told_a_host_that_is_no_wildcard(
    bind: str, advertise: str | None, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: "cache-0.example.org")
    assert config(bind=bind, advertise=advertise).host == host


@pytest.mark.parametrize("name", ["localhost", "localhost.localdomain"])
def test_others_are_not_told_that_a_node_is_their_own_machine(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: name)
    monkeypatch.setattr(socket, "gethostname", lambda: "node-7")

    assert config(bind="0.0.0.0").host == "node-7"


def test_a_node_is_given_two_heartbeats_before_it_counts_as_lost() -> None:
    assert "got 0.9 and heartbeat_interval_s=0.5" in problem_of(node_timeout_s=0.9)
    assert config(node_timeout_s=0.2, heartbeat_interval_s=0.1).node_timeout_s == 0.2


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        config().flight_port = 1


GIB = 1024**3


@pytest.mark.parametrize(
    ("container", "shards"),
    [(8 * GIB, 6 * GIB), (4 * GIB, 3 * GIB), (2 * GIB, GIB), ("64GiB", 48 * GIB)],
)
def test_the_shards_get_what_a_container_has_beside_a_gibibyte_or_a_quarter(
    container: object, shards: int
) -> None:
    assert config(container_memory_limit_bytes=container).memory().shard_limit_bytes == shards


def test_without_a_limit_of_the_container_the_one_given_counts() -> None:
    assert config(memory_limit_bytes="1GiB").memory().shard_limit_bytes == GIB


@pytest.mark.parametrize("container", [GIB // 2, GIB, GIB + 64 * 1024**2 - 1])
def test_a_container_that_leaves_too_little_for_shards_is_refused(container: int) -> None:
    problem = problem_of(container_memory_limit_bytes=container, flight_port=-1)

    assert "container_memory_limit_bytes must leave at least" in problem
    assert f"got {container}" in problem
    assert "flight_port" in problem
    assert config(container_memory_limit_bytes=GIB + 64 * 1024**2).memory().shard_limit_bytes


def test_two_memory_limits_are_refused_with_both() -> None:
    problem = problem_of(memory_limit_bytes=GIB, container_memory_limit_bytes=8 * GIB)

    assert "cannot be combined" in problem
    assert str(GIB) in problem and str(8 * GIB) in problem


@pytest.mark.parametrize(
    "bad",
    [
        *("", "team/cache", "kubernetes:cache", "kubernetes:Team/cache", "kubernetes:a/b/c", 7),
        *("etcd:", "etcd:team/cache", "etcd:Cache", "etcd:http://host:1/cache"),
    ],
)
def test_an_election_names_a_lease(bad: object) -> None:
    problem = problem_of(leader_election=bad)
    assert "leader_election must be kubernetes:NAMESPACE/NAME of a Lease, or etcd:NAME" in problem
    assert repr(bad) in problem
    elected = config(leader_election="etcd:cache")
    assert elected.lease == ("", "cache") and not elected.is_coordinator
    elected = config(leader_election="kubernetes:team-a/cache")
    assert elected.lease == ("team-a", "cache") and not elected.is_coordinator


@pytest.mark.parametrize(
    ("values", "coordinates"),
    [
        ({}, True),
        ({"advertise": "job-0-0.job", "coordinator": "job-0-0.job:50052"}, True),
        ({"advertise": "job-0-0.job", "coordinator": "JOB-0-0.job.:50052"}, True),
        ({"advertise": "job-0-1.job", "coordinator": "job-0-0.job:50052"}, False),
        ({"advertise": "job-0-0.job", "coordinator": "job-0-0.job:50053"}, False),
        ({"bind": "127.0.0.2", "coordinator": "127.0.0.2:50052"}, True),
        ({"bind": "fd00::1", "coordinator": "[fd00::1]:50052"}, True),
        ({"bind": "127.0.0.2", "coordinator": "127.0.0.2:7", "control_port": 7}, True),
        ({"bind": "127.0.0.2", "coordinator": "127.0.0.2:7", "control_port": 0}, False),
    ],
)
def test_a_node_whose_coordinator_is_itself_coordinates(
    values: dict[str, Any], coordinates: bool
) -> None:
    assert config(**values).is_coordinator is coordinates


def test_an_ipv6_address_stands_in_brackets_before_a_port() -> None:
    assert config(bind="fd00::1").listen_host == "[fd00::1]"
    assert config(bind="fd00::1").host == "[fd00::1]"
    assert config(bind="127.0.0.2").listen_host == "127.0.0.2"


@pytest.mark.parametrize(
    ("changes", "address"),
    [
        ({"advertise": "cache-0.job"}, "cache-0.job:50051"),
        ({"advertise": "::1", "flight_port": 1234}, "[::1]:1234"),
        ({"advertise": "cache-0.job", "flight_port": 0}, None),
        ({"bind": "10.0.0.7"}, None),
    ],
)
def test_a_node_has_a_lasting_address_where_one_is_given(
    tmp_path: Path, changes: dict[str, Any], address: str | None
) -> None:
    assert NodeConfig(cache_dir=tmp_path, **changes).lasting_address == address


def test_each_setting_with_a_text_is_an_option_that_reaches_the_configuration() -> None:
    parameters = {each.name: each for each in setting_options.parameters_of(NodeConfig)}
    without = {"token", "cluster", "etcd"}  # of the environment
    assert {*parameters} == {*NodeConfig.model_fields} - without
    defaults = {
        name: each.default
        for name, each in parameters.items()
        if each.default not in (None, each.empty)
    }
    assert config(**defaults) == config()


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("team-a=1KiB..1MiB", NamespaceShare("team-a", 1024, 1024**2)),
        ("team-a=..5", NamespaceShare("team-a", 0, 5)),
        ("default=5..", NamespaceShare("default", 5, None)),
    ],
)
def test_a_share_of_a_namespace_has_a_guaranteed_or_a_largest_size(
    text: str, share: NamespaceShare
) -> None:
    config = NodeConfig.build(cache_dir="/cache", namespace_share=[text, "b=..1GiB"])

    assert config.namespace_share == (share, NamespaceShare("b", 0, 1024**3))


@pytest.mark.parametrize(
    "text", ["", "team", "team=", "team=..", "=1..2", "a/b=1..2", "team=2..1", "team=many..", "t=1"]
)
def test_what_is_no_share_is_quoted(text: str) -> None:
    with pytest.raises(ConfigError, match=r"namespace_share.*must") as caught:
        NodeConfig.build(cache_dir="/cache", namespace_share=[text])
    assert repr(text) in str(caught.value) or "'many'" in str(caught.value)
