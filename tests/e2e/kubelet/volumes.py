"""The volumes of a pod as directories."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cache_runtimes.local.pods import Objects, Pod, VolumeFile, volume_files
from cache_runtimes.local.run import write_files
from tests.e2e.kubelet.objects import UnsupportedPodError

Json = dict[str, Any]
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
    pod: Pod, secrets: Objects, config_maps: Objects, tokens: Tokens
) -> Iterator[dict[str, Path]]:
    """A directory for each volume of a pod, removed at the end. Tokens are not renewed.

    Raises:
        UnsupportedPodError: a volume is of another kind.
        ConfigError: a Secret, a ConfigMap or a key of it is absent.
    """
    with TemporaryDirectory(prefix="pod-", ignore_cleanup_errors=True) as root:
        found: dict[str, Path] = {}
        for volume in pod.spec.get("volumes") or ():
            found[volume["name"]] = path = Path(root, volume["name"])
            path.mkdir()
            write_files(path, _files(volume, pod, secrets, config_maps, tokens))
        yield found


def _files(
    volume: Json, pod: Pod, secrets: Objects, config_maps: Objects, tokens: Tokens
) -> dict[str, VolumeFile]:
    if "projected" in volume:
        found: dict[str, VolumeFile] = {}
        for each in volume["projected"]["sources"]:
            found |= _files(each, pod, secrets, config_maps, tokens)
        return found
    if source := volume.get("serviceAccountToken"):
        token = tokens[source.get("audience") or ""]
        return {source["path"]: VolumeFile.of(token, {}, {})}
    if "persistentVolumeClaim" in volume:
        return {}
    if not volume.keys() & {"emptyDir", "secret", "configMap", "downwardAPI"}:
        raise UnsupportedPodError(f"volume {volume}")
    return volume_files(volume, pod, secrets, config_maps)
