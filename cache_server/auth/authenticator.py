"""Headers and certificate of a call -> its principal. The one place that decides who calls."""

from __future__ import annotations

import hmac
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from cache_protocol.errors import CacheError, UnauthenticatedError
from cache_protocol.wire.credentials import NO_CREDENTIALS, Credentials
from cache_protocol.wire.protocol_version import check_caller
from cache_server.auth.caller_log import CallerLog
from cache_server.auth.kubernetes import Cluster
from cache_server.auth.principals import ANYONE, Principal, Role
from cache_server.auth.token_file import TokenFile
from cache_server.auth.verbs import caller_of, is_ours, role_of

RECHECK_S = 30.0  # a stream may outlive its credentials by this time
_BEARER = "bearer "
_SHARED = Principal("cache", roles=frozenset({Role.ADMIN, Role.NODE}))


class Authenticator:
    """Finds the principal of each call. Thread-safe.

    Args:
        tokens: file of principals, see `TokenFile`.
        jwt: file of the issuers of JSON web tokens, see `cache_server.auth.jwt_tokens`.
        own: what this node shows to others. Without the other settings, its token is shared by the
            whole cache: every caller with the same token is an admin and a node.
        pods: rules for the pods of this node's namespace, see `JwtVerifier.of_pods`.
        cluster: of this pod.
        log: of callers.

    Raises:
        ConfigError: a file cannot be read, a rule is bad, or PyJWT is not installed.
    """

    def __init__(
        self,
        tokens: Path | None = None,
        jwt: Path | None = None,
        own: Credentials | None = None,
        pods: Sequence[str] = (),
        cluster: Cluster = Cluster(),  # noqa: B008
        log: CallerLog | None = None,
    ) -> None:
        self.log = log or CallerLog()
        self._tokens = None if tokens is None else TokenFile(tokens)
        self._jwt = None
        if jwt is not None or pods:
            from cache_server.auth.jwt_tokens import JwtVerifier  # an optional package

            shown = own or NO_CREDENTIALS
            self._jwt = (
                JwtVerifier.of_pods(pods, shown, cluster)
                if jwt is None
                else JwtVerifier.of_file(jwt, shown, cluster)
            )
        by_file = tokens is not None or self._jwt is not None
        self._shared = None if by_file or own is None or own.current_token() is None else own

    @property
    def is_open(self) -> bool:
        """Whether every caller may do everything."""
        return self._tokens is None and self._jwt is None and self._shared is None

    @property
    def knows_certificates(self) -> bool:
        """Whether a certificate can say who calls."""
        return self._tokens is not None

    def authenticate(self, headers: Mapping[str, str], peer: str) -> Principal:
        """The principal of a call.

        Args:
            headers: of the call, by lower-case name; ``authorization`` is read.
            peer: the first subject alternative name of the caller's certificate; empty: none.

        Raises:
            UnauthenticatedError: it has no credentials, or wrong or expired ones.
        """
        if self.is_open:
            return ANYONE
        given = headers.get("authorization", "")
        if given:
            if given[: len(_BEARER)].lower() != _BEARER:
                raise UnauthenticatedError("the authorization header must be 'Bearer TOKEN'")
            return self._of_token(given[len(_BEARER) :].strip())
        if peer and self._tokens is not None:
            found = self._tokens.of_certificate(peer)
            if found is None:
                raise UnauthenticatedError(f"no principal has the certificate of {peer!r}")
            return found
        raise UnauthenticatedError(
            "this cache needs a token: set CACHE_TOKEN or CACHE_TOKEN_FILE, or pass token"
        )

    def _of_token(self, token: str) -> Principal:
        if self._shared is not None:
            own = self._shared.current_token() or ""
            if hmac.compare_digest(own.encode(), token.encode()):
                return _SHARED
        if self._tokens is not None and (found := self._tokens.of_token(token)) is not None:
            return found
        if self._jwt is not None:
            return self._jwt.principal(token)
        raise UnauthenticatedError("the token is not known to this cache")


class Caller:
    """The caller of one verb, which is checked again during a long stream. One thread at a time.

    Args:
        authenticator: of this node.
        verb: a row of `cache_server.auth.verbs`.
        headers, peer: see `Authenticator.authenticate`.
        address: of the other end of the connection.

    Attributes:
        about: what the call is about, see `CallerLog.note`.

    Raises:
        RequestError: the caller speaks a protocol that is too old or too new.
        UnauthenticatedError: the caller has no valid credentials.
        PermissionDeniedError: the caller lacks the role of the verb.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        verb: str,
        headers: Mapping[str, str],
        peer: str,
        address: str = "",
    ) -> None:
        self._authenticator, self._verb = authenticator, verb
        self._headers, self._peer = headers, peer
        self.address = address
        self.about: dict[str, str] = {}
        self._noted: CacheError | None = None
        self._found: Principal | None = None
        self.principal = self._check()

    def note(self, error: CacheError | None = None) -> None:
        """Records the end of the call, see `CallerLog.note`; an error once."""
        if error is None or error is not self._noted:
            self._noted = error
            log = self._authenticator.log
            log.note(self._verb, self._found, self.address, about=self.about, error=error)

    def note_read(self, dataset: str, version: str) -> None:
        """Records a read, see `CallerLog.note_read`."""
        self._authenticator.log.note_read(self.principal, self.address, dataset, version)

    def still_allowed(self) -> Principal:
        """The principal, authenticated again if the last time is long ago.

        Raises:
            UnauthenticatedError, PermissionDeniedError: the credentials ended or were taken away.
        """
        if time.monotonic() > self._check_at or time.time() > self.principal.expires_at:
            self.principal = self._check()
        return self.principal

    def _check(self) -> Principal:
        found = ANYONE
        try:
            role = role_of(self._verb)
            if role is not None:
                check_caller(self._headers, caller_of(self._verb), is_ours=is_ours(self._verb))
                found = self._found = self._authenticator.authenticate(self._headers, self._peer)
                found.require(role, self._verb)
        except CacheError as error:
            self.note(error)
            raise
        self._check_at = time.monotonic() + RECHECK_S
        return found
