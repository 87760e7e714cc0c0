"""JSON web tokens, such as those of Kubernetes service accounts, verified offline by PyJWT.

In a pod, the issuer is that of the pod's own token, which the kubelet wrote, and the keys are those
of the API server. So nothing of the cluster is configured.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from http.client import HTTPException
from pathlib import Path, PurePath
from typing import Annotated, Any

import jwt
from pydantic import BaseModel, ConfigDict, Field

from cache_protocol.errors import ConfigError, NodeUnavailableError, UnauthenticatedError
from cache_protocol.wire.credentials import Credentials, ReloadedFile
from cache_server.auth.kubernetes import Cluster, PodClaims
from cache_server.auth.principals import Principal, Role
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
_FIRST_RETRY_S = 1.0  # while there are no keys at all
_FETCH_TIMEOUT_S = 5.0
_MAX_JWKS_BYTES = 1024 * 1024


class Rule(BaseModel):
    """The roles of some subjects; the first rule that matches counts.

    Attributes:
        subject: the claim ``sub``, with shell wildcards.
        pod: the name of its Kubernetes pod, with shell wildcards; ``*``: also of no pod.
        namespace: None: the Kubernetes namespace of the token.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    subject: Annotated[str, Field(min_length=1)]
    pod: Annotated[str, Field(min_length=1)] = "*"
    roles: Roles
    namespace: Namespace | None = None


class JwtSettings(BaseModel):
    """Whose tokens are accepted, and what their subjects may do.

    Attributes:
        issuer, audience: the claims ``iss`` and ``aud``. Without an issuer, it is that of this
            node's own token.
        jwks: file, or ``https://`` address, of the issuer's public keys; None: the cluster's keys.
        jwks_ca: file of the certificates that sign the one of that address.
        jwks_token_file: of a token for that address.
        rules: in order.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    issuer: Annotated[str, Field(min_length=1)] | None = None
    audience: Annotated[str, Field(min_length=1)] = "data-cache"
    jwks: Annotated[str, Field(min_length=1)] | None = None
    jwks_ca: Path | None = None
    jwks_token_file: str | None = None
    rules: Annotated[tuple[Rule, ...], Field(min_length=1)]


class JwtVerifier:
    """Principals of the tokens of one issuer. Thread-safe.

    Args:
        settings: the current ones; only their rules may change.
        own: what this node shows to others.
        cluster: its keys are used where the settings name none.

    Raises:
        ConfigError: a file of keys cannot be read, or settings that are left out cannot be found.
    """

    def __init__(
        self, settings: Callable[[], JwtSettings], own: Credentials, cluster: Cluster
    ) -> None:
        self._settings = settings
        self._own = own
        self._issuer = settings().issuer
        self._issuer_now()  # a missing one ends the start
        self._keys = _keys_of(settings(), cluster)

    @classmethod
    def of_file(cls, path: Path, own: Credentials, cluster: Cluster) -> JwtVerifier:
        """By a YAML file with the fields of `JwtSettings`; its rules are read again.

        Raises:
            ConfigError: also if the file cannot be read.
        """
        file = ReloadedFile(path, lambda text: parse_yaml(text, JwtSettings))
        try:
            return cls(file.value, own, cluster)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @classmethod
    def of_pods(cls, rules: Sequence[str], own: Credentials, cluster: Cluster) -> JwtVerifier:
        """By rules for the pods of this node's namespace; no other namespace has a rule.

        Args:
            rules: ``ROLE[,ROLE]:POD``, where POD is a pod's name with shell wildcards. ``*`` also
                is a token of no pod.

        Raises:
            ConfigError: also for a bad rule, which it quotes; or if this node is in no pod.
        """
        namespace = PodClaims.of(_claims_of(own)).namespace
        if namespace is None:
            raise ConfigError("the token of this node names no Kubernetes namespace")
        parsed = [_pod_rule(text, f"system:serviceaccount:{namespace}:*") for text in rules]
        settings = JwtSettings(rules=tuple(parsed))
        return cls(lambda: settings, own, cluster)

    def principal(self, token: str) -> Principal:
        """The principal of a token.

        Raises:
            NodeUnavailableError: the keys of the issuer are not known yet.
            UnauthenticatedError: it is no token of this issuer and audience, it expired, or no rule
                matches it.
        """
        settings = self._settings()
        try:
            key = self._keys.find(jwt.get_unverified_header(token).get("kid"))
            claims = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],  # not the one that the token names
                issuer=self._issuer_now(),
                audience=settings.audience,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except jwt.PyJWTError as error:
            raise UnauthenticatedError(f"the token is not accepted: {error}") from None
        return _principal(claims, settings.rules)

    def _issuer_now(self) -> str:
        return self._issuer or str(_claims_of(self._own).get("iss"))


def _principal(claims: Mapping[str, Any], rules: Sequence[Rule]) -> Principal:
    subject, of_pod = str(claims["sub"]), PodClaims.of(claims)
    for rule in rules:
        if not fnmatch.fnmatchcase(subject, rule.subject):
            continue
        if not fnmatch.fnmatchcase(of_pod.pod, rule.pod):
            continue
        namespace = rule.namespace or of_pod.namespace
        if namespace is None:
            raise UnauthenticatedError(
                f"the token of {subject!r} names no namespace, and neither does its rule"
            )
        return Principal(subject, namespace, rule.roles, of_pod.instance, float(claims["exp"]))
    raise UnauthenticatedError(f"no rule of this cache is for {subject!r}, pod {of_pod.pod!r}")


def _claims_of(own: Credentials) -> Mapping[str, Any]:
    """The claims of this node's token, unverified: it comes from the kubelet, not from a caller.

    Raises:
        ConfigError: it has none, or one of another kind.
    """
    token = own.current_token()
    claims = None if token is None else _unverified(token)
    if claims is None or not isinstance(claims.get("iss"), str):
        raise ConfigError(
            "CACHE_TOKEN_FILE must be a projected ServiceAccount token: the issuer of the callers' "
            "tokens is that of this node's token"
        )
    return claims


@lru_cache(maxsize=4)
def _unverified(token: str) -> Mapping[str, Any] | None:
    try:
        claims: Mapping[str, Any] = jwt.decode(token, options={"verify_signature": False})
    except jwt.PyJWTError:
        return None
    return claims


def _pod_rule(text: str, subject: str) -> Rule:
    roles, colon, pod = text.partition(":")
    unknown = set(roles.split(",")) - set(Role)
    if unknown or not colon or not pod:
        raise ConfigError(
            f"--auth-pods must be ROLE[,ROLE]:POD with the roles {', '.join(Role)}, got {text!r}"
        )
    return Rule(subject=subject, pod=pod, roles=frozenset(map(Role, roles.split(","))))


def _keys_of(settings: JwtSettings, cluster: Cluster) -> _FileKeys | _FetchedKeys:
    if settings.jwks is None:
        if cluster.address is None:
            raise ConfigError(
                "this is no pod, so the keys of a cluster are not known: KUBERNETES_SERVICE_HOST "
                "and KUBERNETES_SERVICE_PORT are not set"
            )
        return _FetchedKeys(
            f"{cluster.address}/openid/v1/jwks",
            Credentials(token_file=str(cluster.directory / "token")),
            cluster.directory / "ca.crt",
            is_cluster=True,
        )
    if settings.jwks.startswith("https://"):
        token = Credentials(token_file=settings.jwks_token_file)
        return _FetchedKeys(settings.jwks, token, settings.jwks_ca)
    if "://" in settings.jwks:
        raise ConfigError(f"jwks must be a file or https://, got {settings.jwks}")
    return _FileKeys(settings.jwks)


class _FileKeys:
    """The keys of a file, which is read again when it changes."""

    def __init__(self, path: str) -> None:
        self._file = ReloadedFile(path, _parse_keys)

    def find(self, kid: object) -> jwt.PyJWK:
        return _find(self._file.value(), kid)


class _FetchedKeys:
    """The keys at an address, fetched at the first use, again every hour, and for unknown ones."""

    def __init__(
        self, url: str, token: Credentials, ca: PurePath | None, *, is_cluster: bool = False
    ) -> None:
        self._url, self._token, self._ca = url, token, ca
        self._is_cluster = is_cluster
        self._lock = threading.Lock()
        self._keys: dict[str, jwt.PyJWK] = {}
        self._fetched_at = self._tried_at = float("-inf")

    def find(self, kid: object) -> jwt.PyJWK:
        # A caller with a known key does not wait for a fetch of another one.
        if self._lock.acquire(blocking=kid not in self._keys):
            try:
                self._fetch_if_due(kid)
            finally:
                self._lock.release()
        if not self._keys:
            raise NodeUnavailableError(f"the keys at {self._url} were not fetched yet")
        return _find(self._keys, kid)

    def _fetch_if_due(self, kid: object) -> None:
        now = time.monotonic()
        is_due = kid not in self._keys or now - self._fetched_at > _KEYS_LIVE_S
        pause_s = _RETRY_S if self._keys else _FIRST_RETRY_S
        if is_due and now - self._tried_at > pause_s:
            self._tried_at = now
            try:
                self._keys = _parse_keys(self._fetch())
                self._fetched_at = now
            except (OSError, ValueError, HTTPException) as error:
                logger.error("keys not fetched url=%s reason=%s", self._url, error)

    def _fetch(self) -> str:
        request = urllib.request.Request(self._url, headers=dict(self._token.authorization()))
        context = ssl.create_default_context(cafile=self._ca)
        context.sslsocket_class = _socket_until(time.monotonic() + _FETCH_TIMEOUT_S)
        handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=context)]
        if self._is_cluster:
            # Python 3.13 is strict: it refuses authorities of clusters that lack a key identifier.
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
            # A proxy of the environment is for sources.
            handlers.append(urllib.request.ProxyHandler({}))
        opener = urllib.request.build_opener(*handlers)
        with opener.open(request, timeout=_FETCH_TIMEOUT_S) as answer:
            body: bytes = answer.read(_MAX_JWKS_BYTES)
            return body.decode()


def _socket_until(deadline: float) -> type[ssl.SSLSocket]:
    """The class of a socket that receives until a deadline.

    A time limit of urllib is for each receive: a server could send one byte in each.
    """

    class Socket(ssl.SSLSocket):
        def recv_into(self, *args: Any, **kwargs: Any) -> int:
            if (left_s := deadline - time.monotonic()) <= 0:
                raise TimeoutError("the answer timed out")
            self.settimeout(left_s)
            return super().recv_into(*args, **kwargs)

    return Socket


def _parse_keys(text: str) -> dict[str, jwt.PyJWK]:
    """The keys by their id.

    Raises:
        ValueError: it is no set of keys.
    """
    try:
        keys = jwt.PyJWKSet.from_dict(json.loads(text)).keys
    except (jwt.PyJWTError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a set of JSON web keys: {error}") from None
    return {str(key.key_id): key for key in keys if key.algorithm_name in _ALGORITHMS}


def _find(keys: Mapping[str, jwt.PyJWK], kid: object) -> jwt.PyJWK:
    if kid is None and len(keys) == 1:
        return next(iter(keys.values()))
    if not isinstance(kid, str) or kid not in keys:
        raise jwt.InvalidTokenError("its key is not one of the issuer's")
    return keys[kid]
