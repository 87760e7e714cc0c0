"""Every value of the chart has a schema: wrong ones are refused by name, right ones render."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from cache_protocol.storage.memory_budget import shard_bytes
from cache_runtimes import MANIFESTS
from cache_server.auth.jwt_tokens import Rule
from cache_server.auth.principals import Role
from tests.helm import CHART, helm, template
from tests.kustomize import customised
from tests.manifests import memory_bytes
from tests.runtime_rules import problems

Json = dict[str, Any]

SCHEMA: Json = json.loads((CHART / "values.schema.json").read_text("utf-8"))
VALUES: Json = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)
IN_JOB = ("torch-distributed-data-cache", "jax-distributed-data-cache")


def resolved(schema: Json) -> Json:
    name = schema.get("$ref", "").rpartition("/")[2]
    return {**SCHEMA["definitions"][name], **schema} if name else schema


def leaves(schema: Json = SCHEMA, *path: str) -> Iterator[tuple[tuple[str, ...], Json]]:
    """Each value of the schema, those of lists and free maps not."""
    for name, each in schema["properties"].items():
        if name == "global":
            continue
        found = resolved(each)
        yield (*path, name), found
        if "properties" in found:
            yield from leaves(found, *path, name)


def wrong_values(rule: Json) -> Iterator[Any]:
    """Values of other types, and of the type that the rule excludes."""
    examples = {
        "string": ["x y", "\u00e9"],
        "integer": [0, -1, 100_000],
        "boolean": [],
        "array": [[1], ["x y"], [{"a": 1}]],
        "object": [{"unknown": 1}],
    }
    others = {"string": "two", "integer": 3, "boolean": True, "array": ["a"], "object": {"a": "b"}}
    yield from examples[rule["type"]]
    yield from (value for kind, value in others.items() if kind != rule["type"])
    yield 2.5


def wrong_settings() -> list[tuple[str, Any, str]]:
    """Path, value, and the name that a refusal must have."""
    found = []
    for path, rule in leaves():
        dotted = ".".join(path)
        found += [(dotted, value, path[-1]) for value in wrong_values(rule)]
        slip = path[-1][:-1]
        found.append((".".join((*path[:-1], slip)), 3, slip))
    return found


def with_value(path: str, value: Any) -> Json:
    made = copy.deepcopy(VALUES)
    *parents, last = path.split(".")
    place = made
    for parent in parents:
        place = place[parent]
    place[last] = value
    return made


def test_the_schema_has_the_values_of_the_chart_each_with_a_text_and_no_others() -> None:
    def names(values: Json, *path: str) -> set[str]:
        found = set()
        for name, value in values.items():
            found.add(".".join((*path, name)))
            if isinstance(value, dict):
                found |= names(value, *path, name)
        return found

    paths = {".".join(path): rule for path, rule in leaves()}
    free = {"monitoring.dashboardLabels.grafana_dashboard"}
    assert paths.keys() == names(VALUES) - free
    assert [path for path, rule in paths.items() if not rule.get("description")] == []
    VALIDATOR.validate(VALUES)

    def objects(schema: Any) -> Iterator[Json]:
        if isinstance(schema, dict):
            if schema.get("type") == "object":
                yield schema
            for each in schema.values():
                yield from objects(each)

    open_ones = [each for each in objects(SCHEMA) if each.get("additionalProperties", True) is True]
    assert open_ones == [SCHEMA["properties"]["global"]]


def test_its_lists_of_words_are_those_of_the_project() -> None:
    folders = sorted(path.parent.name for path in MANIFESTS.glob("*/runtime.yaml"))
    properties = SCHEMA["properties"]
    assert properties["runtimes"]["items"]["enum"] == folders
    rule = properties["auth"]["properties"]["sharedRules"]["items"]
    assert rule["properties"].keys() == Rule.model_fields.keys()
    assert set(rule["properties"]["roles"]["items"]["enum"]) == {role.value for role in Role}


def test_two_hundred_wrong_values_are_refused_by_name() -> None:
    cases = wrong_settings()
    assert len(cases) >= 200
    for path, value, name in cases:
        found = list(VALIDATOR.iter_errors(with_value(path, value)))
        assert found, (path, value)
        named = [str(step) for error in found for step in error.absolute_path]
        assert name in named or any(f"'{name}'" in error.message for error in found), (path, value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("cache.node=3", "cache: Additional property node is not allowed"),
        ('cache.nodes="two"', "cache.nodes: Invalid type. Expected: integer, given: string"),
        ('runtimes=["typo"]', "runtimes.0 must be one of"),
        ('cache.shardBytes="6Gi"', "cache: Additional property shardBytes is not allowed"),
        ('cache.memory="1Gi"', "cache.memory: 1Gi leaves no memory for rows"),
    ],
)
def test_helm_refuses_them_so(value: str, words: str) -> None:
    done = template(value)
    assert done.returncode == 1
    assert words in done.stderr
    assert not done.stdout


# Value -> what kustomize calls it.
SWITCHES = {
    "beforeKubernetes135": "before-kubernetes-1.35",
    "gpu": "gpu",
    "openshift": "openshift",
    "startTogether": "start-together",
}


def right_cases(count: int) -> list[Json]:
    """Settings of one runtime each; the same in every run."""
    random_ = random.Random(66)
    return [
        {
            "folder": random_.choice(IN_JOB),
            "switches": [name for name in SWITCHES if random_.random() < 0.4],
            "nodes": random_.choice([1, 2, 3, 16, 100]),
            "memory": random_.choice(
                ["", "1088Mi", "1500Mi", "3Gi", "5555Mi", "13Gi", "32Gi", "2Ti"]
            ),
        }
        for _ in range(count)
    ]


def kustomization(case: Json, name: str, folder: Path) -> Path:
    """A user's kustomization that says the same as the values."""
    pod = "/spec/template/spec/replicatedJobs/0/template/spec/template/spec"
    job = "/spec/template/spec/replicatedJobs/0/template/spec"
    env = f"{pod}/containers/0/env/3"
    patch: list[Json] = [
        {"op": "test", "path": f"{env}/name", "value": "CACHE_WORLD_SIZE"},
        {"op": "replace", "path": f"{env}/value", "value": str(case["nodes"])},
        {"op": "replace", "path": f"{job}/parallelism", "value": case["nodes"]},
        {"op": "replace", "path": f"{job}/completions", "value": case["nodes"]},
    ]
    if case["memory"]:
        num_bytes = memory_bytes(case["memory"])
        for kind in ("requests", "limits"):
            path = f"{pod}/containers/0/resources/{kind}/memory"
            patch.append({"op": "replace", "path": path, "value": case["memory"]})
        path = f"{pod}/volumes/0/emptyDir/sizeLimit"
        patch.append({"op": "replace", "path": path, "value": str(shard_bytes(num_bytes))})
    made = folder / name
    made.mkdir()
    target = {"kind": "ClusterTrainingRuntime"}
    (made / "kustomization.yaml").write_text(
        yaml.safe_dump(
            {
                "namePrefix": f"{name}-",
                "resources": [os.path.relpath(MANIFESTS / case["folder"], made)],
                "components": [
                    os.path.relpath(MANIFESTS / "components" / SWITCHES[switch], made)
                    for switch in case["switches"]
                ],
                "patches": [{"target": target, "patch": json.dumps(patch)}],
            }
        )
    )
    return made


def chart_of(case: Json) -> Json:
    values = [f"{name}=true" for name in case["switches"]]
    (made,) = helm(
        f'runtimes=["{case["folder"]}"]',
        "shared.enabled=false",
        f"cache.nodes={case['nodes']}",
        f'cache.memory="{case["memory"]}"',
        *values,
    ).values()
    return made


def test_fifty_right_ones_render_to_what_kustomize_makes(tmp_path: Path) -> None:
    cases = right_cases(50)
    folders = [kustomization(case, f"case{i}", tmp_path) for i, case in enumerate(cases)]
    built = {
        name.partition("/")[2].partition("-")[0]: thing
        for name, thing in customised(tmp_path, resources=folders).items()
    }
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(chart_of, cases))
    for number, (case, ours) in enumerate(zip(cases, made, strict=True)):
        theirs = built[f"case{number}"]
        assert in_bytes(ours["spec"]) == in_bytes(theirs["spec"]), case
        assert problems(ours) == []


def in_bytes(spec: Json) -> Json:
    """A spec whose volumes have their sizes in bytes."""
    made = copy.deepcopy(spec)
    for volume in made["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"][
        "spec"
    ]["volumes"]:
        limit = volume.get("emptyDir", {}).get("sizeLimit", "")
        if limit.endswith("i"):
            volume["emptyDir"]["sizeLimit"] = str(memory_bytes(limit))
    return made
