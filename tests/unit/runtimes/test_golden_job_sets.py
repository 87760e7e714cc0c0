"""What Trainer's and JobSet's own code made of TrainJobs, and what `render` makes of them.

``tests/golden/NAME.json.xz`` holds a runtime and 32 TrainJobs. Each case has the objects that
Trainer 2.3.0 applies, or who refuses which field. Some have the Jobs of JobSet 0.12.0 too. The
runtimes are inputs: they do not follow the shipped ones.
"""

from __future__ import annotations

import copy
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cache_runtimes.local.render import render_objects
from cache_runtimes.local.trainer.info import containers
from cache_runtimes.local.trainer.jobset import jobs_of
from cache_runtimes.local.trainer.refusals import WEBHOOK_OF_JOB_SET, RefusedError

Json = dict[str, Any]

GOLDEN = Path(__file__).parents[2] / "golden"
NAMES = sorted(path.name.removesuffix(".json.xz") for path in GOLDEN.glob("*.json.xz"))
MADE_ANEW = "<made anew>"  # by the controller, for each TrainJob


def read(name: str) -> Json:
    found: Json = json.loads(lzma.decompress((GOLDEN / f"{name}.json.xz").read_bytes()))
    return found


def rendered(train_job: Json, runtime: Json, *, with_jobs: bool) -> Json:
    """An answer in the form of the golden files, with what only a cluster fills in."""
    try:
        made = render_objects(train_job, runtime)
    except RefusedError as error:
        return {"refused": grouped(error)}
    for thing in made:
        if thing["kind"] == "JobSet":
            fill_job_set(thing["spec"])
        if thing["kind"] == "Secret":
            thing["data"] = dict.fromkeys(("ssh-privatekey", "ssh-publickey"), MADE_ANEW)
    if not with_jobs:
        return {"objects": made}
    (job_set,) = (thing for thing in made if thing["kind"] == "JobSet")
    return {"objects": made, "jobs": jobs_of(job_set)}


def grouped(error: RefusedError) -> list[Json]:
    """Trainer's webhook refuses field by field, JobSet's all fields at once."""
    found: list[Json] = []
    for refusal in error.refusals:
        again = found and refusal.by == found[-1]["by"] == WEBHOOK_OF_JOB_SET
        if again and refusal.field not in found[-1]["fields"]:
            found[-1]["fields"].append(refusal.field)
        elif not again:
            found.append({"by": refusal.by, "fields": [refusal.field]})
    return found


def fill_job_set(spec: Json) -> None:
    """The defaults of the CRD, and the structs that Go writes although they are empty."""
    for job in spec["replicatedJobs"]:
        job.setdefault("groupName", "default")
        job.setdefault("replicas", 1)
        job["template"].setdefault("metadata", {})
        job["template"]["spec"]["template"].setdefault("metadata", {})
        for container in containers(job):
            container.setdefault("resources", {})
            for variable in container.get("env", ()):
                source = variable.get("valueFrom", {}).get("resourceFieldRef")
                if source is not None:
                    source.setdefault("divisor", "0")
    if "failurePolicy" in spec:
        spec["failurePolicy"].setdefault("restartStrategy", "Recreate")
    for policy in spec.get("volumeClaimPolicies", ()):
        for template in policy["templates"]:
            template.setdefault("status", {})


def golden(case: Json) -> Json:
    """The answer of a case, without the references to the uid of the TrainJob."""
    found = {key: copy.deepcopy(case[key]) for key in ("objects", "jobs", "refused") if key in case}
    for thing in found.get("objects", ()):
        (owner,) = thing["metadata"].pop("ownerReferences")
        assert owner["name"] == case["trainJob"]["metadata"]["name"]
    return found


def differences(ours: Any, theirs: Any, path: str) -> Iterator[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted({*ours, *theirs}):
            if key == "protocol" and {ours.get(key, "TCP"), theirs.get(key, "TCP")} == {"TCP"}:
                continue  # filled in on the way in, so in some ports and not in others
            if key not in ours or key not in theirs:
                yield f"{path}.{key} is in {'ours' if key in ours else 'the golden one'} alone"
            else:
                yield from differences(ours[key], theirs[key], f"{path}.{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(one, other, f"{path}[{index}]")
    elif ours != theirs:
        yield f"{path}: {ours!r}, not {theirs!r}"


@pytest.mark.parametrize("name", NAMES)
def test_every_job_set_is_the_one_that_trainer_makes(name: str) -> None:
    found = read(name)
    assert len(found["cases"]) == 32
    problems = [
        problem
        for case in found["cases"]
        for problem in differences(
            rendered(case["trainJob"], found["runtime"], with_jobs="jobs" in case),
            golden(case),
            case["case"],
        )
    ]
    assert problems == []


def test_the_golden_files_are_all_there() -> None:
    assert len(NAMES) == 16
