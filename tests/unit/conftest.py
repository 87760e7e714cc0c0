"""Leaves out files whose packages the client needs only for an extra, where they are missing."""

from importlib.util import find_spec

_NEED = {
    "client/job/test_progress.py": "kubeflow_trainer_api",
    "protocol/wire/test_lineage.py": "openlineage",
    "protocol/wire/test_tracing.py": "opentelemetry",
}
collect_ignore = [file for file, package in _NEED.items() if find_spec(package) is None]
