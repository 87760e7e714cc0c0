"""Arguments of a dataset by name, for tests with tables of options of several objects."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from cache_client import Connection, Reading, View

_OBJECTS: dict[str, type[Any]] = {"view": View, "cache": Connection, "reading": Reading}


def grouped(**arguments: Any) -> dict[str, Any]:
    """The arguments, with those of a `View`, `Connection` or `Reading` in these objects.

    ``cache`` may be an endpoint or a connection; the others change it.
    """
    for argument, kind in _OBJECTS.items():
        names = [each.name for each in fields(kind) if each.name in arguments]
        given = {name: arguments.pop(name) for name in names}
        before = arguments.get(argument)
        if given and argument == "cache" and not isinstance(before, Connection):
            arguments[argument] = Connection(**{"endpoint": before, **given})
        elif given:
            arguments[argument] = kind(**given) if before is None else replace(before, **given)
    return arguments
