"""Principals of a file: by the SHA-256 of their token, or by the name in their certificate."""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import Annotated, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cache_protocol.datasets import strict_yaml
from cache_protocol.datasets.dataset_names import DEFAULT_NAMESPACE, NAMESPACE
from cache_protocol.wire.credentials import ReloadedFile
from cache_server.auth.principals import Principal, Role

_M = TypeVar("_M", bound=BaseModel)
Namespace = Annotated[str, Field(pattern=f"^{NAMESPACE.pattern}$")]
Roles = Annotated[frozenset[Role], Field(min_length=1)]


class Entry(BaseModel):
    """One principal.

    Attributes:
        sha256: of its token, in hexadecimal digits.
        san: the first subject alternative name of its certificate.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(min_length=1)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    san: Annotated[str, Field(min_length=1)] | None = None
    namespace: Namespace = DEFAULT_NAMESPACE
    roles: Roles

    @model_validator(mode="after")
    def _has_one_proof(self) -> Entry:
        if (self.sha256 is None) == (self.san is None):
            raise ValueError("needs either sha256 or san")
        return self


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    principals: tuple[Entry, ...]


class _Principals(NamedTuple):
    of_digests: tuple[tuple[str, Principal], ...]
    of_names: dict[str, Principal]


class TokenFile:
    """The principals of a YAML file, which is read again when it changes. Thread-safe.

    Raises:
        ConfigError: the file cannot be read, or an entry is bad; quotes no digest.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = ReloadedFile(path, _parse)

    def of_token(self, token: str) -> Principal | None:
        """The principal of a token. Every digest is compared, in constant time."""
        digest = hashlib.sha256(token.encode()).hexdigest()
        found = None
        for known, principal in self._file.value().of_digests:
            if hmac.compare_digest(digest, known):
                found = principal
        return found

    def of_certificate(self, san: str) -> Principal | None:
        """The principal of a client certificate, by its first subject alternative name."""
        return self._file.value().of_names.get(san)


def _parse(text: str) -> _Principals:
    digests, names = [], {}
    for entry in parse_yaml(text, _File).principals:
        principal = Principal(entry.name, entry.namespace, entry.roles)
        if entry.sha256 is not None:
            digests.append((entry.sha256.lower(), principal))
        elif entry.san is not None:
            names[entry.san] = principal
    return _Principals(tuple(digests), names)


def parse_yaml(text: str, model: type[_M]) -> _M:
    """The checked content of a YAML file.

    Raises:
        ValueError: names the bad settings, without their values, which may be secrets.
    """
    try:
        return model.model_validate(strict_yaml.parse(text))
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "it cannot be parsed"
        raise ValueError(f"not YAML: {problem}") from None
    except ValidationError as error:
        problems = (
            f"{'.'.join(map(str, each['loc'])) or 'the file'}: {each['msg']}"
            for each in error.errors(include_input=False, include_url=False)
        )
        raise ValueError("; ".join(problems)) from None
