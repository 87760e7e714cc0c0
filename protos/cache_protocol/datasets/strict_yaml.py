"""Strict YAML: repeated keys and too deep nesting are errors.

PyYAML silently takes the last of two equal keys, such as the second of two filters.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

_MERGE = "tag:yaml.org,2002:merge"  # may be repeated


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            if (key.tag, key.value) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is repeated", key.start_mark
                )
            seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def parse(text: str) -> object:
    """The value of a document.

    Raises:
        yaml.YAMLError: it is not YAML, repeats a key, or is nested too deeply. ValueError: it has
            an invalid date.
    """
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
