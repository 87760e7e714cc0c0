"""Which probes and hooks of a container can be run on one machine. Pure.

What a cluster's API server would refuse of them, and what run-local does not do, is named before
anything runs: a probe that cannot be made would never succeed, and a hook that is left out would
hide what it is there for.
"""

from __future__ import annotations

from typing import Any

from cache_protocol.errors import ConfigError

Json = dict[str, Any]

_PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
_TIMES = {"initialDelaySeconds", "periodSeconds", "timeoutSeconds", "failureThreshold"}
# What is done of each action.
_PROBE_ACTIONS = {
    "grpc": {"port", "service"},
    "tcpSocket": {"port"},
    "httpGet": {"port", "path", "scheme"},
    "exec": {"command"},
}
_HOOK_ACTIONS = {"exec": {"command"}, "sleep": {"seconds"}}


def check_handlers(container: Json, where: str) -> None:
    """Looks at the probes and the lifecycle of a container.

    Args:
        where: names the container.

    Raises:
        ConfigError: naming what of them cannot be run here.
    """
    for name in _PROBES:
        if container.get(name) is not None:
            action = {key: value for key, value in container[name].items() if key not in _TIMES}
            _check_action(action, _PROBE_ACTIONS, container, f"{where}: {name}")
    lifecycle = container.get("lifecycle") or {}
    for name, hook in lifecycle.items():
        if name != "preStop":
            raise ConfigError(f"{where}: run-local does not do lifecycle.{name}")
        _check_action(hook, _HOOK_ACTIONS, container, f"{where}: lifecycle.preStop")


def port_number(port: int | str, container: Json) -> int:
    """The number of a port that may be given by its name.

    Raises:
        ConfigError: quoting one that is neither.
    """
    for known in container.get("ports") or ():
        if known.get("name") == port:
            return int(known["containerPort"])
    if isinstance(port, int) and 0 < port < 65_536:
        return port
    raise ConfigError(f"container {container['name']} has no port {port!r}")


def _check_action(given: Json, known: dict[str, set[str]], container: Json, where: str) -> None:
    for key in given:
        if key not in known:
            raise ConfigError(f"{where}: run-local does not do {key}")
    if len(given) != 1:
        raise ConfigError(f"{where} must have one action of {', '.join(known)}, got {given!r}")
    [(action, fields)] = given.items()
    for key in fields:
        if key not in known[action]:
            raise ConfigError(f"{where}: run-local does not do {action}.{key}")
    if fields.get("scheme") not in (None, "HTTP"):
        raise ConfigError(f"{where}: run-local does not do {action} by {fields['scheme']!r}")
    if "port" in known[action]:
        try:
            port = port_number(fields.get("port"), container)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        if action == "grpc" and fields["port"] != port:
            raise ConfigError(f"{where}: grpc.port must be a number, got {fields['port']!r}")
