"""Finds the functions that this machine has: those of this package, and of others by entry point.

Only the packages of functions that the node allows are imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from cache_protocol.errors import ConfigError, some_of
from cache_server.functions.declared import Function

GROUP: Final = "trainer_data_cache.functions"
# Function -> its module, and the packages of the extra `llm` that it needs.
SHIPPED: Final = {
    "tokenize": ("tokens", ("tokenizers",)),
    "num_tokens": ("tokens", ("tokenizers",)),
    "decode_tokens": ("tokens", ("tokenizers",)),
    "chat_tokens": ("chat", ("jinja2", "tokenizers")),
    "normalize_text": ("texts", ()),
    "json_field": ("texts", ()),
    "hash_bucket": ("texts", ()),
}


def installed(allowed: Iterable[str] | None = None) -> dict[str, Function]:
    """The functions that SQL may call, by name.

    Args:
        allowed: their names; None: those of this package whose libraries are installed.

    Raises:
        ConfigError: one of them is not installed, or is not what it should be.
    """
    if allowed is None:
        return {name: function for name in SHIPPED if (function := _shipped(name)) is not None}
    return {name: function_named(name) for name in allowed}


@lru_cache
def function_named(name: str) -> Function:
    """One installed function.

    Raises:
        ConfigError: there is none of this name; says what to install.
    """
    if name in SHIPPED:
        function = _shipped(name)
        if function is None:
            raise ConfigError(why_not_installed(name))
        return function
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name not in points:
        known = sorted({*SHIPPED, *points})
        raise ConfigError(
            f"no function {name!r} is installed; installed are {some_of(known, like=name)}"
        )
    return _loaded(points[name])


def why_not_installed(name: str) -> str:
    """Why a function of this package cannot be called."""
    if _shipped(name) is not None:
        return f"function {name!r} is not allowed: the nodes need --allow-function {name}"
    needed = " and ".join(SHIPPED[name][1])
    return f"function {name!r} needs {needed}: install trainer-data-cache[llm] on every node"


def _loaded(point: EntryPoint) -> Function:
    try:
        found = point.load()
    except Exception as error:  # of any package
        raise ConfigError(
            f"cannot import function {point.name!r} from {point.value}: {error}"
        ) from None
    if not isinstance(found, Function) or found.name != point.name:
        raise ConfigError(
            f"entry point {point.name!r} of {GROUP} must be a cache_server.functions.Function of "
            f"this name, got {type(found).__name__} {getattr(found, 'name', '')!r}"
        )
    return found


def _shipped(name: str) -> Function | None:
    module, packages = SHIPPED[name]
    try:
        for package in packages:
            import_module(package)
    except ImportError:
        return None
    make: Callable[[], Function] = getattr(import_module(f"cache_server.functions.{module}"), name)
    return make()
