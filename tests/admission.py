"""What an API server refuses of an object: its schema, and the CEL rules of its schema.

``tests/schemas/schemas.json.xz`` has the schemas without their texts: the OpenAPI of Kubernetes
1.36.2, and the CRDs of Trainer 2.3.0 and JobSet 0.12.0.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import cel
from jsonschema import Draft202012Validator, ValidationError, validators

Json = dict[str, Any]

_FILE = Path(__file__).parent / "schemas" / "schemas.json.xz"
_META = "#/definitions/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
_RULES = "x-kubernetes-validations"
# Groups whose CRDs are not in the file.
_ELSEWHERE = ("cert-manager.io/", "monitoring.coreos.com/")


def problems(thing: Json) -> Iterator[str]:
    """The violations of the schema of an object that is created, each with its path.

    There are none for kinds whose CRDs the file does not have.
    """
    if thing["apiVersion"].startswith(_ELSEWHERE):
        return
    found = list(_validator(kind_of(thing)).iter_errors(thing))
    yield from (_line(error) for error in found)
    if not found:  # the rules expect the types of the schema
        yield from broken_rules(thing)


def broken_rules(thing: Json, old: Json | None = None) -> Iterator[str]:
    """The CEL rules that an object breaks, and with ``old`` those that its update breaks."""
    for path, rule, now, before in _rules_at(schemas()["kinds"][kind_of(thing)], thing, old, "$"):
        context = {"self": now}
        if "oldSelf" in rule["rule"]:
            if before is None:
                continue
            context["oldSelf"] = before
        if _program(rule["rule"]).execute(context) is not True:
            yield f"{path}: {rule['message']}"


def rules_of(kind: str) -> set[tuple[str, str]]:
    """The path and the text of each CEL rule of a kind."""
    return set(_rules_in(schemas()["kinds"][kind], "$"))


def kind_of(thing: Json) -> str:
    """The name of its schema, such as ``v1 Secret``."""
    return f"{thing['apiVersion']} {thing['kind']}"


@cache
def schemas() -> Json:
    """All schemas. They refuse unknown fields, which an API server drops or refuses."""
    found: Json = json.loads(lzma.decompress(_FILE.read_bytes()))
    for schema in found["kinds"].values():
        if "metadata" in schema.get("properties", {}):
            schema["properties"]["metadata"] = {"$ref": _META}
    _close(found)
    return found


def _close(schema: Any) -> None:
    if isinstance(schema, list):
        for each in schema:
            _close(each)
    elif isinstance(schema, dict):
        for each in schema.values():
            _close(each)
        if isinstance(schema.get("properties"), dict):
            open_ = schema.get("x-kubernetes-preserve-unknown-fields", False)
            schema.setdefault("additionalProperties", open_)


@cache
def _validator(kind: str) -> Any:
    schema = {**schemas()["kinds"][kind], "definitions": schemas()["definitions"]}
    return _Validator(schema)


def _keys_are_unique(
    validator: Any, keys: list[str], items: Any, schema: Json
) -> Iterator[ValidationError]:
    """``x-kubernetes-list-map-keys``: no two items have the same keys."""
    of_item = schema["items"].get("properties", {})
    if isinstance(items, list) and all(isinstance(item, dict) for item in items):
        found = [tuple(_key(item, key, of_item) for key in keys) for item in items]
        if len(set(found)) < len(found):
            yield ValidationError(f"the same {', '.join(keys)} twice: {found}")


def _key(item: Json, key: str, properties: Json) -> Any:
    default = properties.get(key, {}).get("default")
    return item.get(key, "TCP" if key == "protocol" else default)


_Validator = validators.extend(
    Draft202012Validator, {"x-kubernetes-list-map-keys": _keys_are_unique}
)


def _line(error: ValidationError) -> str:
    return f"{error.json_path}: {error.message[:300]}"


@cache
def _program(rule: str) -> Any:
    return cel.compile(rule)


def _rules_at(
    schema: Json, now: Any, before: Any, path: str
) -> Iterator[tuple[str, Json, Any, Any]]:
    """Each rule with its path, its value, and the value before where there is one."""
    for rule in schema.get(_RULES, ()):
        yield path, rule, now, before
    if isinstance(now, dict):
        known, rest = schema.get("properties", {}), schema.get("additionalProperties")
        for name, value in now.items():
            below = known.get(name, rest)
            if isinstance(below, dict):
                old = before.get(name) if isinstance(before, dict) else None
                yield from _rules_at(below, value, old, f"{path}.{name}")
    elif isinstance(now, list):
        keys = schema.get("x-kubernetes-list-map-keys", ())
        olds = {tuple(each.get(key) for key in keys): each for each in before or () if keys}
        for index, value in enumerate(now):
            old = olds.get(tuple(value.get(key) for key in keys)) if keys else None
            yield from _rules_at(schema["items"], value, old, f"{path}[{index}]")


def _rules_in(schema: Json, path: str) -> Iterator[tuple[str, str]]:
    for rule in schema.get(_RULES, ()):
        yield path, rule["rule"]
    for name, below in schema.get("properties", {}).items():
        yield from _rules_in(below, f"{path}.{name}")
    for key, mark in (("items", "[]"), ("additionalProperties", "{}")):
        if isinstance(schema.get(key), dict):
            yield from _rules_in(schema[key], f"{path}{mark}")
