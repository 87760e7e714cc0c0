"""The examples of docs/security.md. `tests/integration/test_access.py` has caches of each mode."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
import yaml

from cache_protocol.datasets.dataset_spec import DatasetSpec
from cache_protocol.wire.credentials import NO_CREDENTIALS
from cache_runtimes import MANIFESTS
from cache_server.auth.authenticator import Authenticator
from cache_server.auth.jwt_tokens import JwtSettings, JwtVerifier
from cache_server.auth.kubernetes import Cluster
from cache_server.auth.principals import Principal, Role
from cache_server.auth.token_file import parse_yaml
from tests.manifests import container_named, env_of, job_named, pod_of, read

FENCE = re.DOTALL | re.MULTILINE
PAGE = (Path(__file__).parents[3] / "docs/security.md").read_text(encoding="utf-8")
MODES = dict(re.findall(r"<!-- mode: (\w+) -->\n```yaml\n(.*?)^```", PAGE, FENCE))


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_the_page_has_an_example_of_each_file() -> None:
    assert set(MODES) == {"tokens", "jwt", "certificates"}


def test_the_file_of_tokens_lets_alice_write_in_her_namespace(tmp_path: Path) -> None:
    digests = re.findall(r"[0-9a-f]{64}", MODES["tokens"])
    text = MODES["tokens"].replace(digests[0], hashlib.sha256(b"of-alice").hexdigest())
    found = Authenticator(write(tmp_path / "tokens.yaml", text))

    assert found.authenticate({"authorization": "Bearer of-alice"}, "") == Principal(
        "alice", "team-a", frozenset({Role.WRITER})
    )


def test_the_file_of_certificates_names_a_node_and_the_trainers(tmp_path: Path) -> None:
    found = Authenticator(write(tmp_path / "principals.yaml", MODES["certificates"]))

    assert found.authenticate({}, "node-0").roles == {Role.NODE}
    assert found.authenticate({}, "trainer.team-a").namespace == "team-a"


def test_the_file_of_an_issuer_is_one(tmp_path: Path) -> None:
    text = MODES["jwt"]
    for path in re.findall(r"/var/run/\S+", text):
        text = text.replace(path, str(write(tmp_path / Path(path).name, "a-token")))

    JwtVerifier.of_file(write(tmp_path / "jwt.yaml", text), NO_CREDENTIALS, Cluster())
    assert parse_yaml(text, JwtSettings).audience == "data-cache"


def test_the_spec_that_is_shared_is_a_spec() -> None:
    blocks = re.findall(r"```yaml\n(.*?)^```", PAGE, FENCE)
    (text,) = (block for block in blocks if "readers" in block)
    assert DatasetSpec.from_mapping(yaml.safe_load(text)).readers == ("team-b",)


@pytest.mark.parametrize("role", Role)
def test_the_page_explains_every_role(role: Role) -> None:
    assert f"| {role} | " in PAGE


def test_the_pod_of_the_page_has_the_token_that_a_trainer_has() -> None:
    text = re.search(r"<!-- pod -->\n```yaml\n(.*?)^```", PAGE, FENCE)
    assert text is not None
    pod = yaml.safe_load(text[1])
    (container,) = pod["spec"]["containers"]
    trainer = pod_of(
        job_named(read(MANIFESTS / "torch-distributed-data-cache/runtime.yaml"), "node")
    )
    node = container_named(trainer, "node")
    assert pod["spec"]["volumes"][0] in trainer["spec"]["volumes"]
    assert container["volumeMounts"][0] in node["volumeMounts"]
    assert {"name": "CACHE_TOKEN_FILE", "value": env_of(container)["CACHE_TOKEN_FILE"]} in node[
        "env"
    ]
    assert env_of(container)["CACHE_ENDPOINT"] == env_of(node)["CACHE_ENDPOINT"].replace(
        "$(TRAIN_JOB_NAME)", "lineitem"
    )


def test_the_kustomization_of_the_page_names_folders_that_are_there() -> None:
    text = re.search(r"<!-- kustomization -->\n```yaml\n(.*?)^```", PAGE, FENCE)
    assert text is not None
    named = yaml.safe_load(text[1])
    for folder in (*named["resources"], *named["components"]):
        assert (MANIFESTS.parent / folder / "kustomization.yaml").exists()
