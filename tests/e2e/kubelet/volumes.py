"""The volumes of a pod as directories."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.e2e.kubelet.objects import UnsupportedPodError

Json = dict[str, Any]
Objects = Mapping[str, Json]  # by name
Tokens = Mapping[str, str]  # by audience; empty: that of the API server


def audiences(spec: Json) -> set[str]:
    """The audiences of the tokens that a pod's volumes project."""
    return {
        source["serviceAccountToken"].get("audience") or ""
        for volume in spec.get("volumes") or ()
        for source in (volume.get("projected") or {}).get("sources") or ()
        if "serviceAccountToken" in source
    }


@contextmanager
def directories(
    spec: Json, secrets: Objects, config_maps: Objects, tokens: Tokens
) -> Iterator[dict[str, Path]]:
    """A directory for each volume of a pod, removed at the end. Tokens are not renewed.

    Raises:
        UnsupportedPodError: a volume is of another kind, or its object is absent.
    """
    with TemporaryDirectory(prefix="pod-", ignore_cleanup_errors=True) as root:
        found: dict[str, Path] = {}
        for volume in spec.get("volumes") or ():
            found[volume["name"]] = path = Path(root, volume["name"])
            path.mkdir()
            for name, content in _files(volume, secrets, config_maps, tokens).items():
                (path / name).touch(0o600)  # ssh refuses a key that others may read
                (path / name).write_bytes(content)
        yield found


def _files(
    volume: Json, secrets: Objects, config_maps: Objects, tokens: Tokens
) -> dict[str, bytes]:
    if "emptyDir" in volume:
        return {}
    if source := volume.get("projected"):
        found: dict[str, bytes] = {}
        for each in source["sources"]:
            found |= _files(each, secrets, config_maps, tokens)
        return found
    if source := volume.get("serviceAccountToken"):
        return {source["path"]: tokens[source.get("audience") or ""].encode()}
    if source := volume.get("secret"):
        data = _known(secrets, source.get("secretName") or source["name"]).get("data") or {}
        content = {name: base64.b64decode(value) for name, value in data.items()}
    elif source := volume.get("configMap"):
        data = _known(config_maps, source["name"]).get("data") or {}
        content = {name: value.encode() for name, value in data.items()}
    else:
        raise UnsupportedPodError(f"volume {volume}")
    items = source.get("items")
    return {item["path"]: content[item["key"]] for item in items} if items else content


def _known(objects: Objects, name: str) -> Json:
    if name not in objects:
        raise UnsupportedPodError(f"no Secret or ConfigMap {name!r}")
    return objects[name]
