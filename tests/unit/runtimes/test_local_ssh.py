"""The files of ssh that run-local gives to pods of MPI."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cache_protocol.errors import ConfigError
from cache_runtimes import MANIFESTS
from cache_runtimes.local import ssh
from cache_runtimes.local.pods import Pod, Process
from tests.train_jobs import container, env, replicated_job

NODE = container("node", "sshd", env=env(GIVEN="1", TAKEN_AWAY="2"))
POD = Pod("job", "default", "job-node-0-0", "127.1.2.3", replicated_job("node", NODE), 0)


def write(home: Path, keys: str = "/keys", *, program: str | None = "/usr/bin/ssh") -> None:
    environment = {"PATH": "/bin", "CACHE_TOKEN": "it's", "GIVEN": "1"}
    process = Process(("sshd",), environment, home)
    ssh.write_files(POD, {"mpi-ssh-auth": Path(keys)}, home, process, program)


def settings(path: Path) -> set[str]:
    """The settings of a file of the image, without its comments."""
    lines = (line.strip() for line in path.read_text().splitlines())
    return {line for line in lines if line and not line.startswith("#")}


@pytest.mark.parametrize("name", ["sshd_config", "ssh_config"])
def test_the_settings_are_those_of_the_image(tmp_path: Path, name: str) -> None:
    write(tmp_path, "/home/mpiuser/.ssh")
    shipped = settings(MANIFESTS / "images/trainer" / name)
    here = settings(tmp_path / f".{name}")
    assert {line for line in shipped - here if not line.startswith("PidFile")} == set()


def test_a_session_has_the_environment_of_its_container_without_that_of_the_manifest(
    tmp_path: Path,
) -> None:
    write(tmp_path)
    script = f'. {tmp_path}/.environment; echo "$CACHE_TOKEN/$PATH/$GIVEN/$TAKEN_AWAY"'
    told = subprocess.run(
        ["/bin/sh", "-c", script],
        env={"GIVEN": "by SetEnv", "TAKEN_AWAY": "by SetEnv"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == "it's//bin/by SetEnv/\n"


def test_paths_may_have_any_character(tmp_path: Path) -> None:
    home = tmp_path / "it's a $HOME"
    home.mkdir()
    program = tmp_path / "my ssh"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    write(home, program=str(program))
    told = subprocess.run([home / "bin/ssh", "a b"], capture_output=True, text=True, check=True)
    assert told.stdout.splitlines() == ["-F", f"{home}/.ssh_config", "a b"]
    config = (home / ".sshd_config").read_text().splitlines()
    (forced,) = (line for line in config if line.startswith("ForceCommand "))
    told = subprocess.run(
        ["/bin/sh", "-c", forced.removeprefix("ForceCommand ")],
        env={"SSH_ORIGINAL_COMMAND": "echo $CACHE_TOKEN"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == "it's\n"


def test_keys_are_made_by_the_given_program(tmp_path: Path) -> None:
    program = tmp_path / "ssh-keygen"
    program.write_text('#!/bin/sh\nfor path; do :; done\necho a > "$path"; echo b > "$path.pub"\n')
    program.chmod(0o755)
    assert ssh.new_key(str(program)) == {"ssh-privatekey": "a\n", "ssh-publickey": "b\n"}


def test_a_machine_without_ssh_is_told_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="install openssh-server"):
        write(tmp_path, program=None)
    with pytest.raises(ConfigError, match="install openssh-server"):
        ssh.new_key(None)
