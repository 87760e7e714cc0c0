"""What MPI's image has for ssh: the files by which mpirun starts processes in other pods.

The same settings as ``images/trainer/sshd_config`` and ``ssh_config``, for pods that share one
machine: each sshd listens on the address of its pod, and its sessions get the environment that an
image would have given them.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory

from cache_protocol.errors import ConfigError
from cache_runtimes.local.pods import SSH_KEYS, Pod, Process
from cache_runtimes.local.trainer.info import NODE, containers

_SSHD_CONFIG = """\
Port 2222
ListenAddress {address}
PidFile none
HostKey {key}
AuthorizedKeysFile {authorized_keys}
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
UsePAM no
ForceCommand . {environment}; eval "$SSH_ORIGINAL_COMMAND"
"""
_SSH_CONFIG = """\
Host *
    Port 2222
    IdentityFile {key}
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
"""


def new_key(program: str | None) -> dict[str, str]:
    """A key pair as the Secret of a TrainJob has it.

    Args:
        program: the path of ``ssh-keygen``.

    Raises:
        ConfigError: there is no ``ssh-keygen``.
    """
    if program is None:
        raise ConfigError("MPI needs ssh-keygen, ssh and sshd: install openssh-server")
    with TemporaryDirectory() as folder:
        path = Path(folder, "key")
        subprocess.run([program, "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
        public = path.with_suffix(".pub")
        return {"ssh-privatekey": path.read_text(), "ssh-publickey": public.read_text()}


def write_files(
    pod: Pod, volumes: Mapping[str, PurePath], home: Path, node: Process, ssh: str | None
) -> None:
    """Writes the files of ssh for a pod of MPI into its home.

    Args:
        node: the process of its container, whose sessions have the same environment without the
            variables of the manifest.
        ssh: the path of that program.

    Raises:
        ConfigError: there is no ssh.
    """
    if ssh is None:
        raise ConfigError(f"{pod.name}: MPI needs ssh and sshd: install openssh-server")
    of_manifest = {
        item["name"]
        for container in containers(pod.job)
        if container["name"] == NODE
        for item in container.get("env") or ()
    }
    lines = [f"unset {name}\n" for name in sorted(of_manifest - node.environment.keys())]
    for name, value in node.environment.items():
        if name not in of_manifest:
            lines.append(f"export {name}={shlex.quote(value)}\n")
    paths = {
        "key": volumes[SSH_KEYS] / "id_rsa",
        "authorized_keys": volumes[SSH_KEYS] / "authorized_keys",
        "environment": home / ".environment",
    }
    names = {name: shlex.quote(str(path)) for name, path in paths.items()}
    (home / ".environment").write_text("".join(lines))
    (home / ".sshd_config").write_text(_SSHD_CONFIG.format(address=pod.address, **names))
    (home / ".ssh_config").write_text(_SSH_CONFIG.format(**names))
    (home / "bin").mkdir()
    program = home / "bin/ssh"
    command = shlex.join([ssh, "-F", str(home / ".ssh_config")])
    program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    program.chmod(0o755)
