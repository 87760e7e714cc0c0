"""`cachectl load` as the initializer of a TrainJob that is deleted while it waits."""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import closing

from cache_runtimes import MANIFESTS
from cache_runtimes.local.policies import ContainerExit, after_pod_failure
from tests import forked_python
from tests.manifests import container_named, job_named, pod_of, read

WAIT_S = 60.0
RUNTIME = read(MANIFESTS / "torch-distributed-shared-data-cache/runtime.yaml")
JOB = job_named(RUNTIME, "dataset-initializer")


def test_a_load_ends_at_once_on_a_signal() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        environment = {**os.environ, "STORAGE_URI": "s3://warehouse/tpch/lineitem/"}
        endpoint = f"grpc://127.0.0.1:{silent.getsockname()[1]}"
        command = ["load", "--from-env", "--endpoint", endpoint]
        with forked_python.Popen(
            [sys.executable, "-m", "cache_client", *command], env=environment
        ) as process:
            silent.settimeout(WAIT_S)
            with closing(silent.accept()[0]):  # it waits for an answer
                process.send_signal(signal.SIGTERM)
                assert process.wait(WAIT_S) == -signal.SIGTERM


def test_it_is_not_the_first_process_of_its_container_which_signals_do_not_end() -> None:
    pod = pod_of(JOB)["spec"]
    assert container_named(pod_of(JOB), "dataset-initializer")["command"] == ["cachectl"]
    assert pod["shareProcessNamespace"] is True


def test_its_end_by_a_signal_does_not_fail_the_job() -> None:
    for code, action in ((65, "FailJob"), (78, "FailJob"), (143, "Ignore"), (1, "Count")):
        ended = ContainerExit("dataset-initializer", code, "")
        assert after_pod_failure(JOB["template"]["spec"], [ended]) == action
