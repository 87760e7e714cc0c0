"""The lease and the documents of one cache in etcd, by its JSON gateway.

/trainer-data-cache/<name>/lease        who coordinates
/trainer-data-cache/<name>/maps/<map>   a document

Each value is JSON. A change is a transaction that compares the revision of the key that was read.
"""

from __future__ import annotations

import base64
import errno
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from cache_protocol.errors import ConfigError, missing_package
from cache_server.auth.etcd import Etcd
from cache_server.election.lease import Lease
from cache_server.election.objects import (
    LEASE_TIMEOUT_S,
    TIMEOUT_S,
    ConflictError,
    RefusedError,
    StoredMap,
)

_PAGE = 50  # documents in one answer
_MAY_PASS = (401, 408, 429)  # of the answers below 500
_OLD_TOKEN = ("invalid auth token", "auth store is old")  # a token of etcd lasts five minutes
_SHORTEST_S = 0.001
_NEVER = "0"  # the revision of a key that is not there


class EtcdStore:
    """An `ElectionStore` in etcd.

    Args:
        etcd: where it is.
        name: of the cache.

    Raises:
        ConfigError: a package is missing, or a file of TLS cannot be read.
    """

    kind = "etcd key"

    def __init__(self, etcd: Etcd, name: str) -> None:
        self.name = name
        self._gateway = _Gateway(etcd)
        self._lease = f"/trainer-data-cache/{name}/lease"
        self._maps = f"/trainer-data-cache/{name}/maps/"

    def read_lease(self) -> Lease | None:
        """See `LeaseStore`."""
        found = self._gateway.read(self._lease, LEASE_TIMEOUT_S)
        if found is None:
            return None
        with _checked_value(found):
            holder, duration_s = str(found.value["holder"]), float(found.value["duration_s"])
            return Lease(holder, duration_s, found.revision, int(found.value["transitions"]))

    def write_lease(self, before: Lease | None, holder: str, duration_s: float) -> Lease:
        """See `LeaseStore`."""
        is_new = before is not None and before.holder != holder
        transitions = 0 if before is None else before.transitions + is_new
        value = {"holder": holder, "duration_s": duration_s, "transitions": transitions}
        revision = before.version if before else _NEVER
        revision = self._gateway.replace(self._lease, value, revision, LEASE_TIMEOUT_S)
        return Lease(holder, duration_s, revision, transitions)

    def read_map(self, name: str) -> StoredMap | None:
        """See `ElectionStore`."""
        found = self._gateway.read(self._maps + name)
        return None if found is None else _stored(name, found)

    def maps(self) -> Iterator[StoredMap]:
        """See `ElectionStore`."""
        for found in self._gateway.read_all(self._maps):
            yield _stored(found.key.removeprefix(self._maps), found)

    def write_map(self, wanted: StoredMap) -> StoredMap:
        """See `ElectionStore`."""
        made_s = wanted.made_s or time.time()
        content = base64.b64encode(wanted.content).decode()
        value = {"content": content, "notes": dict(wanted.notes), "made_s": made_s}
        key = self._maps + wanted.name
        revision = self._gateway.replace(key, value, wanted.version or _NEVER)
        return StoredMap(wanted.name, wanted.content, wanted.notes, revision, made_s)

    def remove_map(self, name: str) -> None:
        """See `ElectionStore`."""
        self._gateway.remove(self._maps + name)


class _Found(NamedTuple):
    key: str
    value: Any
    revision: str


def _stored(name: str, found: _Found) -> StoredMap:
    with _checked_value(found):
        value = found.value
        content, made_s = base64.b64decode(value["content"]), float(value["made_s"])
        return StoredMap(name, content, dict(value["notes"]), found.revision, made_s)


class _Until:
    """The time for one call, which may log in and ask again.

    Args:
        connect_s, answer_s: of each request.
    """

    def __init__(self, connect_s: float, answer_s: float) -> None:
        self.connect_s, self.answer_s = connect_s, answer_s
        self._ends_at = time.monotonic() + connect_s + answer_s

    def left_s(self) -> float:
        """Seconds for what is left of the call."""
        return max(_SHORTEST_S, self._ends_at - time.monotonic())


class _Gateway:
    """Calls of etcd's JSON gateway. Thread-safe.

    Each call goes to one endpoint, and the next call to another one if that does not answer: what
    was not answered may have happened.
    """

    def __init__(self, etcd: Etcd) -> None:
        try:
            import urllib3
        except ModuleNotFoundError as error:
            raise ConfigError(missing_package(error, "--leader-election", "election")) from None
        self._etcd = etcd
        self._failures = 0
        self._token: str | None = None
        self._lock = threading.Lock()
        try:
            self._pool = urllib3.PoolManager(retries=False, ssl_context=_ssl_context(etcd))
        except OSError as error:
            raise ConfigError(
                f"a file of ETCDCTL_CACERT, ETCDCTL_CERT or ETCDCTL_KEY cannot be used: {error}"
            ) from None

    def read(self, key: str, timeout_s: tuple[float, float] = TIMEOUT_S) -> _Found | None:
        """What a key has; None: it is not there."""
        answer = self._call("kv/range", {"key": _encoded(key)}, timeout_s)
        return next(map(_found, answer.get("kvs", ())), None)

    def read_all(self, prefix: str) -> Iterator[_Found]:
        """The keys that begin with a prefix."""
        after, end = prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1)
        while True:
            body = {"key": _encoded(after), "range_end": _encoded(end), "limit": _PAGE}
            answer = self._call("kv/range", body)
            page = [*map(_found, answer.get("kvs", ()))]
            yield from page
            if not answer.get("more"):
                return
            after = page[-1].key + "\0"

    def replace(
        self, key: str, value: Any, revision: str, timeout_s: tuple[float, float] = TIMEOUT_S
    ) -> str:
        """Replaces what a key had at a revision; returns the new revision.

        Raises:
            ConflictError: it has another revision.
        """
        put = {"key": _encoded(key), "value": _encoded(json.dumps(value))}
        same = {"key": put["key"], "target": "MOD", "result": "EQUAL", "mod_revision": revision}
        body = {"compare": [same], "success": [{"request_put": put}]}
        answer = self._call("kv/txn", body, timeout_s)
        if not answer.get("succeeded"):
            raise ConflictError(errno.EIO, f"etcd has another revision of {key} than {revision}")
        return str(answer["header"]["revision"])

    def remove(self, key: str) -> None:
        """Removes a key, if it is there."""
        self._call("kv/deleterange", {"key": _encoded(key)})

    def _call(
        self, verb: str, body: Mapping[str, Any], timeout_s: tuple[float, float] = TIMEOUT_S
    ) -> Any:
        until = _Until(*timeout_s)
        token = self._token or self._log_in(until)
        status, answer = self._post(verb, body, until, token)
        if token is not None and any(map(_reason(answer).__contains__, _OLD_TOKEN)):
            status, answer = self._post(verb, body, until, self._log_in(until))
        return _checked(status, answer)

    def _log_in(self, until: _Until) -> str | None:
        if self._etcd.user is None:
            return None
        body = {"name": self._etcd.user, "password": self._etcd.password or ""}
        self._token = str(_checked(*self._post("auth/authenticate", body, until))["token"])
        return self._token

    def _post(
        self,
        verb: str,
        body: Mapping[str, Any],
        until: _Until,
        token: str | None = None,
    ) -> tuple[int, Any]:
        from urllib3 import Timeout
        from urllib3.exceptions import HTTPError

        failures = self._failures
        endpoint = self._etcd.endpoints[failures % len(self._etcd.endpoints)]
        try:
            response = self._pool.request(
                "POST",
                f"{endpoint}/v3/{verb}",
                body=json.dumps(body),
                headers={"Authorization": token} if token else {},
                timeout=Timeout(connect=until.connect_s, read=until.answer_s, total=until.left_s()),
            )
            answer = response.json()
        except (HTTPError, ValueError) as error:
            self._turn_away(failures)
            raise OSError(errno.EIO, f"etcd at {endpoint} does not answer: {error}") from None
        if response.status >= 500:
            self._turn_away(failures)
        return response.status, answer

    def _turn_away(self, failures: int) -> None:
        """Asks the next endpoint from now on."""
        with self._lock:
            if self._failures == failures:  # not twice for calls beside each other
                self._failures += 1


def _checked(status: int, answer: Any) -> Any:
    """An answer, unless it is a refusal."""
    if status < 400:
        return answer
    refused = status < 500 and status not in _MAY_PASS
    kind: type[OSError] = RefusedError if refused else OSError
    raise kind(errno.EIO, f"etcd answers {status} {_reason(answer)}")


def _reason(answer: Any) -> str:
    known = isinstance(answer, Mapping)
    return str(answer.get("message") or answer.get("error") or "") if known else str(answer)


def _ssl_context(etcd: Etcd) -> Any:
    import ssl

    context = ssl.create_default_context(cafile=etcd.ca_file)
    if etcd.cert_file is not None:
        context.load_cert_chain(etcd.cert_file, etcd.key_file)
    return context


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _found(entry: Mapping[str, str]) -> _Found:
    key = base64.b64decode(entry["key"]).decode()
    found = _Found(key, base64.b64decode(entry["value"]), entry["mod_revision"])
    with _checked_value(found):
        return found._replace(value=json.loads(found.value))


@contextmanager
def _checked_value(found: _Found) -> Iterator[None]:
    """Turns the errors of a value that another program wrote into an `OSError`."""
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:
        problem = f"the value of {found.key} in etcd is not of this cache: {error!r}"
        raise OSError(errno.EIO, problem) from None
