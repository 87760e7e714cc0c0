"""The volumes of a pod as directories of this machine.

They live as long as the pod: a container that is restarted in place finds what it wrote, a pod that
takes the place of another starts with empty ones.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache_protocol.errors import ConfigError

Json = dict[str, Any]

MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class PodVolumes:
    """Directories for one pod.

    Attributes:
        directories: by the name of the volume.
        home: for what has no volume: HOME and temporary files.
    """

    directories: Mapping[str, Path]
    home: Path


@contextmanager
def pod_volumes(
    pod: str,
    spec: Json,
    *,
    secrets: Mapping[str, Mapping[str, str]],
    config_maps: Mapping[str, Mapping[str, str]],
) -> Iterator[PodVolumes]:
    """The volumes of a pod, which are removed with the block.

    Raises:
        ConfigError: a kind of volume that there is none of on one machine.
    """
    with ExitStack() as stack:

        def directory(*, in_memory: bool) -> Path:
            root = str(MEMORY) if in_memory and MEMORY.is_dir() else None
            made = tempfile.TemporaryDirectory(
                prefix=f"run-local-{pod}-", dir=root, ignore_cleanup_errors=True
            )
            return Path(stack.enter_context(made))

        directories: dict[str, Path] = {}
        for volume in spec.get("volumes") or ():
            name = volume["name"]
            where = f"{pod}: volume {name!r}"
            if "emptyDir" in volume:
                medium = (volume["emptyDir"] or {}).get("medium")
                directories[name] = directory(in_memory=medium == "Memory")
            elif "secret" in volume or "configMap" in volume:
                files = _files(volume, secrets, config_maps, where)
                directories[name] = directory(in_memory="secret" in volume)
                for file, text in files.items():
                    path = directories[name] / file
                    path.touch(mode=0o600)
                    path.write_text(text, encoding="utf-8")
            else:
                kinds = ", ".join(key for key in volume if key != "name")
                raise ConfigError(f"{where}: run-local has no {kinds or 'such volume'}")
        yield PodVolumes(directories, directory(in_memory=False))


def _files(
    volume: Json,
    secrets: Mapping[str, Mapping[str, str]],
    config_maps: Mapping[str, Mapping[str, str]],
    where: str,
) -> dict[str, str]:
    if "secret" in volume:
        kind, name, known = "Secret", volume["secret"]["secretName"], secrets
    else:
        kind, name, known = "ConfigMap", volume["configMap"]["name"], config_maps
    source = volume.get("secret") or volume["configMap"]
    values = known.get(name)
    if values is None and not source.get("optional"):
        raise ConfigError(f"{where} needs the {kind} {name!r}: put it into the TrainJob's file")
    if not source.get("items"):
        return dict(values or {})
    return {item["path"]: (values or {})[item["key"]] for item in source["items"]}
