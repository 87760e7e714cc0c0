"""JSON web tokens, such as those of Kubernetes service accounts, verified offline by PyJWT."""

from __future__ import annotations

import fnmatch
import json
import logging
import ssl
import threading
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import jwt
from pydantic import BaseModel, ConfigDict, Field

from cache_protocol.errors import ConfigError, NodeUnavailableError, UnauthenticatedError
from cache_protocol.wire.credentials import Credentials
from cache_protocol.wire.reloaded_file import ReloadedFile
from cache_server.auth.principals import Principal
from cache_server.auth.token_file import Namespace, Roles, parse_yaml

logger = logging.getLogger(__name__)

# Without HMAC: its key would let every verifier sign.
_ALGORITHMS = (
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "EdDSA"),
)
_LEEWAY_S = 10.0  # between the clocks of issuer and node
_KEYS_LIVE_S = 3600.0
_RETRY_S = 30.0  # between requests for keys: anyone can send a token with an unknown key
_FETCH_TIMEOUT_S = 5.0
_MAX_JWKS_BYTES = 1024 * 1024


class Rule(BaseModel):
    """The roles of some subjects; the first rule that matches counts.

    Attributes:
        subject: the claim ``sub``, with shell wildcards.
        namespace: None: the Kubernetes namespace of the token.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    subject: Annotated[str, Field(min_length=1)]
    roles: Roles
    namespace: Namespace | None = None


class JwtSettings(BaseModel):
    """Whose tokens are accepted, and what their subjects may do.

    Attributes:
        issuer, audience: the claims ``iss`` and ``aud``.
        jwks: file, or ``https://`` address, of the issuer's public keys.
        jwks_ca: file of the certificates that sign the one of that address.
        jwks_token_file: of a token for that address.
        rules: in order.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    issuer: Annotated[str, Field(min_length=1)]
    audience: Annotated[str, Field(min_length=1)] = "data-cache"
    jwks: Annotated[str, Field(min_length=1)]
    jwks_ca: Path | None = None
    jwks_token_file: str | None = None
    rules: Annotated[tuple[Rule, ...], Field(min_length=1)]


class JwtVerifier:
    """Principals of the tokens of one issuer. Thread-safe.

    Args:
        path: YAML file with the fields of `JwtSettings`; read once.

    Raises:
        ConfigError: the file, or a file of keys, cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._settings = ReloadedFile(path, lambda text: parse_yaml(text, JwtSettings)).value()
        is_address = self._settings.jwks.startswith("https://")
        if not is_address and "://" in self._settings.jwks:
            raise ConfigError(f"{path}: jwks must be a file or https://, got {self._settings.jwks}")
        self._keys = _FetchedKeys(self._settings) if is_address else _FileKeys(self._settings.jwks)

    def principal(self, token: str) -> Principal:
        """The principal of a token.

        Raises:
            NodeUnavailableError: the keys of the issuer are not known yet.
            UnauthenticatedError: it is no token of this issuer and audience, it expired, or no rule
                matches its subject.
        """
        try:
            key = self._keys.find(jwt.get_unverified_header(token).get("kid"))
            claims = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],  # not the one that the token names
                issuer=self._settings.issuer,
                audience=self._settings.audience,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except jwt.PyJWTError as error:
            raise UnauthenticatedError(f"the token is not accepted: {error}") from None
        return self._of_claims(claims)

    def _of_claims(self, claims: Mapping[str, Any]) -> Principal:
        subject = str(claims["sub"])
        in_cluster = claims.get("kubernetes.io")
        in_cluster = in_cluster if isinstance(in_cluster, Mapping) else {}
        for rule in self._settings.rules:
            if not fnmatch.fnmatchcase(subject, rule.subject):
                continue
            namespace = rule.namespace or in_cluster.get("namespace")
            if not isinstance(namespace, str):
                raise UnauthenticatedError(
                    f"the token of {subject!r} names no namespace, and neither does its rule"
                )
            pod = in_cluster.get("pod")
            instance = str(pod.get("name", "")) if isinstance(pod, Mapping) else ""
            return Principal(subject, namespace, rule.roles, instance, float(claims["exp"]))
        raise UnauthenticatedError(f"no rule of this cache is for {subject!r}")


class _FileKeys:
    """The keys of a file, which is read again when it changes."""

    def __init__(self, path: str) -> None:
        self._file = ReloadedFile(path, _parse_keys)

    def find(self, kid: object) -> jwt.PyJWK:
        return _find(self._file.value(), kid)


class _FetchedKeys:
    """The keys at an address, fetched at the first use, again every hour, and for unknown ones."""

    def __init__(self, settings: JwtSettings) -> None:
        self._url = settings.jwks
        self._token = Credentials(token_file=settings.jwks_token_file)
        self._ca = settings.jwks_ca
        self._lock = threading.Lock()
        self._keys: dict[str, jwt.PyJWK] = {}
        self._fetched_at = self._tried_at = float("-inf")

    def find(self, kid: object) -> jwt.PyJWK:
        with self._lock:
            now = time.monotonic()
            is_due = kid not in self._keys or now - self._fetched_at > _KEYS_LIVE_S
            if is_due and now - self._tried_at > _RETRY_S:
                self._tried_at = now
                try:
                    self._keys = _parse_keys(self._fetch())
                    self._fetched_at = now
                except (OSError, ValueError) as error:
                    logger.error("keys not fetched url=%s reason=%s", self._url, error)
            if not self._keys:
                raise NodeUnavailableError(f"the keys at {self._url} were not fetched yet")
            return _find(self._keys, kid)

    def _fetch(self) -> str:
        request = urllib.request.Request(self._url, headers=dict(self._token.headers()))
        context = ssl.create_default_context(cafile=self._ca)
        with urllib.request.urlopen(request, timeout=_FETCH_TIMEOUT_S, context=context) as answer:
            body: bytes = answer.read(_MAX_JWKS_BYTES)
            return body.decode()


def _parse_keys(text: str) -> dict[str, jwt.PyJWK]:
    """The keys by their id.

    Raises:
        ValueError: it is no set of keys.
    """
    try:
        keys = jwt.PyJWKSet.from_dict(json.loads(text)).keys
    except (jwt.PyJWTError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"not a set of JSON web keys: {error}") from None
    return {str(key.key_id): key for key in keys if key.algorithm_name in _ALGORITHMS}


def _find(keys: Mapping[str, jwt.PyJWK], kid: object) -> jwt.PyJWK:
    if kid is None and len(keys) == 1:
        return next(iter(keys.values()))
    if not isinstance(kid, str) or kid not in keys:
        raise jwt.InvalidTokenError("its key is not one of the issuer's")
    return keys[kid]
