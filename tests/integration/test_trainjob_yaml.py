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
