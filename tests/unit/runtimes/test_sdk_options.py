"""`cache_options` for the Kubeflow SDK: one declaration, checked before anything is sent."""

from __future__ import annotations

import inspect
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cache_client import View
from cache_protocol.datasets.job_options import JobOptions
from cache_protocol.errors import ConfigError, RequestError
from tests.kubeflow_backend import import_sdk

kubeflow = import_sdk()
from cache_runtimes import sdk  # noqa: E402

BACKEND: Any = SimpleNamespace(custom_api=None, namespace="a")


def test_it_takes_every_option_of_a_job() -> None:
    taken = inspect.signature(sdk.cache_options).parameters
    assert taken.keys() - {"runtime", "view"} == {each.name for each in fields(JobOptions)}
    for name in taken.keys() - {"runtime"}:
        assert f"        {name}: " in (sdk.cache_options.__doc__ or "")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"replicas": 0}, RequestError, "trainer-data-cache/replicas=0"),
        ({"replicas": "2"}, RequestError, "trainer-data-cache/replicas='2'"),
        ({"sql": "SELECT 1", "columns": ["a"]}, RequestError, "cannot be combined"),
        ({"memory": "8GB"}, RequestError, "memory='8GB': must be a Kubernetes quantity"),
        ({"view": View(subset=np.arange(3))}, ConfigError, "that JSON can hold"),
    ],
)
def test_a_bad_option_is_refused_at_once(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        sdk.cache_options(**options)


def test_it_is_for_the_backend_of_a_cluster() -> None:
    option = sdk.cache_options(replicas=2)
    with pytest.raises(ValueError, match="RuntimePatch option is not compatible"):
        option({}, None, SimpleNamespace())  # type: ignore[arg-type]


def test_a_view_is_a_variable_of_the_trainer_beside_its_own() -> None:
    trainer = kubeflow.CustomTrainer(func=print, env={"A": "1"})
    made: dict[str, Any] = {}
    sdk.cache_options(view=View(where="a > 1", fold=(0, 2)))(made, trainer, BACKEND)
    assert made == {}
    assert trainer.env == {"A": "1", "CACHE_VIEW": '{"where": "a > 1", "fold": [0, 2]}'}
    with pytest.raises(ConfigError, match="view needs a CustomTrainer, got NoneType"):
        sdk.cache_options(view=View(where="a > 1"))(made, None, BACKEND)
