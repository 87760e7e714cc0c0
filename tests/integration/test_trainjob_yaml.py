"""examples/trainjob.yaml, with the commands in it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kubeflow_backend import EXAMPLES, assert_every_row_once, run_locally


@pytest.mark.timeout(240)
def test_the_plain_trainjob_runs_after_the_command_that_writes_its_data(tmp_path: Path) -> None:
    folder = "/tmp/tpch"
    text = (EXAMPLES / "trainjob.yaml").read_text()
    (command,) = (line[1:] for line in text.splitlines() if "tpchgen-cli" in line)
    assert folder in command
    assert f"storageUri: file://{folder}/" in text
    program, *arguments = shlex.split(command.replace(folder, str(tmp_path)))
    subprocess.run(
        [str(Path(sys.executable).parent / program), *arguments],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=60,
    )
    file = tmp_path / "trainjob.yaml"
    file.write_text(text.replace(folder, str(tmp_path)))
    done = run_locally(file)
    assert done.code == 0, str(done)
    lines, table = done.of("node-0-0"), tmp_path / "lineitem"
    assert_every_row_once(lines, table, epochs=2, ranks=2, order_weight=8)


@pytest.mark.frameworks
@pytest.mark.timeout(240)
def test_the_trainjob_of_fine_tuning_runs_after_the_commands_that_prepare_it(
    tmp_path: Path,
) -> None:
    folder = "/tmp/chats"
    text = (EXAMPLES / "fine_tuning.yaml").read_text()
    chats, copies = (
        line[1:] for line in text.splitlines() if line.startswith("#     ") and folder in line
    )
    python, *arguments = shlex.split(chats.replace(folder, str(tmp_path)))
    assert python == "python"
    for command in (
        [sys.executable, *arguments],
        shlex.split(copies.replace(folder, str(tmp_path))),
    ):
        subprocess.run(command, cwd=EXAMPLES.parent, check=True, timeout=60)
    file = tmp_path / "fine_tuning.yaml"
    file.write_text(text.replace(folder, str(tmp_path)))
    done = run_locally(file)
    assert done.code == 0, str(done)
    lines = "\n".join(done.of("node-0-0"))
    assert "120 of 120 seen exactly once in each of 2 epochs" in lines
