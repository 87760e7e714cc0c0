"""A Kubernetes API server in this process, for tests: real HTTP, objects in memory.

It speaks as the API does where clients rely on it: lists and watches from a version, bookmarks and
expiry, selectors, statuses and the wording of refusals. The objects are in `tests.api_objects`; no
controller runs but those that a test starts, such as `tests.stateful_sets`. A test may take
permissions away, make calls fail by rule (`Fault`), break connections off, and read which calls
were made (`Call`). Patches are merge patches only.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import yaml

from tests.api_objects import ApiError, Change, Resource, Store, matches

Json = dict[str, Any]

_WATCH_POLL_S = 0.2


@dataclass(frozen=True)
class Call:
    """A request that was answered.

    Attributes:
        resource: the plural, with a subresource after a slash.
        status: of the answer; 0 where the connection was closed instead.
    """

    verb: str
    resource: str
    namespace: str
    name: str
    status: int


@dataclass
class Fault:
    """Makes calls fail; an absent part of the rule matches every call.

    Attributes:
        status: of the answer; 0 closes the connection without one.
        skip: so many calls are let through first.
        times: so many fail then; None: all.
        carried_out: the call has its effect all the same, and only its answer is lost.
        headers: of the answer, such as ``Retry-After``.
    """

    status: int
    verb: str | None = None
    resource: str | None = None
    name: str | None = None
    skip: int = 0
    times: int | None = None
    carried_out: bool = False
    message: str = "a fault of the test"
    headers: Mapping[str, str] = field(default_factory=dict)

    def strikes(self, verb: str, resource: str, name: str) -> bool:
        wanted = ((self.verb, verb), (self.resource, resource), (self.name, name))
        if any(rule not in (None, value) for rule, value in wanted) or self.times == 0:
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.times is not None:
            self.times -= 1
        return True


class ApiServer:
    """Serves a `Store` on a free port of this machine; a context manager.

    Attributes:
        permissions: the verbs and resources that are allowed; None: all of them.
        faults: tried in order; the first that strikes counts.
        calls: those that were answered.
        on_write: called after each create, replace, patch or delete that had its effect and before
            it is answered, with the number of it, from 1.
        logs: of pods, by name.
    """

    def __init__(self, store: Store | None = None) -> None:
        self.store = store or Store()
        self.permissions: set[tuple[str, str]] | None = None
        self.faults: list[Fault] = []
        self.calls: list[Call] = []
        self.on_write: Callable[[int], None] = lambda number: None
        self.logs: dict[str, str] = {}
        self.generation = 0
        self._writes = 0
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._http = _HttpServer(("127.0.0.1", 0), _handler_of(self))
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(0.05,), name="api-server", daemon=True
        )

    def __enter__(self) -> ApiServer:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
        self.cut_connections()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def write_kubeconfig(self, path: Path, namespace: str = "default") -> Path:
        """A kubeconfig for this server, at ``path``."""
        context = {"cluster": "test", "user": "test", "namespace": namespace}
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "test", "cluster": {"server": self.url}}],
                    "users": [{"name": "test", "user": {}}],
                    "contexts": [{"name": "test", "context": context}],
                    "current-context": "test",
                }
            )
        )
        return path

    def cut_connections(self) -> None:
        """Breaks every connection, also those of watches."""
        with self._lock:
            self.generation += 1
            cut, self._sockets = self._sockets, set()
        for connection in cut:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        with self.store.changed:
            self.store.changed.notify_all()

    @property
    def verbs(self) -> set[tuple[str, str]]:
        """The verbs and resources of the calls."""
        with self._lock:
            return {(call.verb, call.resource) for call in self.calls}

    def add_connection(self, connection: socket.socket) -> None:
        with self._lock:
            self._sockets.add(connection)

    def remove_connection(self, connection: socket.socket) -> None:
        with self._lock:
            self._sockets.discard(connection)

    def check(self, call: Call) -> Fault | None:
        """The fault of a call after its effect, if there is one.

        Raises:
            ApiError: it is not allowed, or a fault strikes it before.
        """
        allowed = self.permissions
        if allowed is not None and (call.verb, call.resource) not in allowed:
            raise ApiError(
                403,
                f'{call.resource} "{call.name}" is forbidden: User "test" cannot {call.verb} '
                f'resource "{call.resource}" in the namespace "{call.namespace}"',
            )
        with self._lock:
            for fault in self.faults:
                if fault.strikes(call.verb, call.resource, call.name):
                    if fault.carried_out:
                        return fault
                    raise ApiError(fault.status, fault.message, headers=fault.headers)
        return None

    def record(self, call: Call) -> None:
        with self._lock:
            self.calls.append(call)

    def wrote(self) -> None:
        with self._lock:
            self._writes += 1
            number = self._writes
        self.on_write(number)


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores broken connections: tests break them."""


@dataclass(frozen=True)
class _Target:
    """The parts of a request."""

    resource: Resource
    namespace: str
    name: str
    subresource: str

    @property
    def label(self) -> str:
        plural = self.resource.plural
        return f"{plural}/{self.subresource}" if self.subresource else plural


_PATH = re.compile(
    r"/(?:api/(?P<core>[^/]+)|apis/(?P<group>[^/]+)/(?P<version>[^/]+))"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/[^/]))?"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+)(?:/(?P<subresource>[^/]+))?)?"
)


def _handler_of(server: ApiServer) -> type[BaseHTTPRequestHandler]:
    class Handler(_Handler):
        api = server

    return Handler


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    api: ApiServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.api.add_connection(self.connection)

    def finish(self) -> None:
        self.api.remove_connection(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Calls are recorded, not printed."""

    def do_GET(self) -> None:
        self._answer("get")

    def do_POST(self) -> None:
        self._answer("create")

    def do_PUT(self) -> None:
        self._answer("update")

    def do_PATCH(self) -> None:
        self._answer("patch")

    def do_DELETE(self) -> None:
        self._answer("delete")

    def _answer(self, verb: str) -> None:
        parts = urlsplit(self.path)
        self._query = dict(parse_qsl(parts.query))
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(length)
        try:
            target = self._target(parts.path)
        except ApiError as error:
            self._send(error.status, error.body())
            return
        if not target.name and verb in ("get", "delete"):
            verb = {"get": "list", "delete": "deletecollection"}[verb]
            if self._query.get("watch") in ("true", "1", "True"):
                verb = "watch"
        body = json.loads(raw) if raw else {}
        name = target.name or (body.get("metadata") or {}).get("name") or ""
        call = Call(verb, target.label, target.namespace, name, 0)
        try:
            fault = self.api.check(call)
            if verb == "watch":
                self._watch(target, call)
                return
            status, answer = self._carry_out(verb, target, body)
            if verb not in ("get", "list"):
                self.api.wrote()
            if fault is not None:
                raise ApiError(fault.status, fault.message, headers=fault.headers)
        except ApiError as error:
            status, answer = error.status, error.body()
            headers = error.headers
        else:
            headers = {}
        self.api.record(Call(call.verb, call.resource, call.namespace, call.name, status))
        if status == 0:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self._send(status, answer, headers)

    def _target(self, path: str) -> _Target:
        match = _PATH.fullmatch(path)
        if match is None:
            raise ApiError(404, "the server could not find the requested resource")
        found = {key: unquote(value) for key, value in match.groupdict(default="").items()}
        resource = self.api.store.resource(
            found["group"], found["core"] or found["version"], found["plural"]
        )
        return _Target(resource, found["namespace"], found["name"], found["subresource"])

    def _carry_out(self, verb: str, target: _Target, body: Any) -> tuple[int, Any]:
        store, plural = self.api.store, target.resource.plural
        name, namespace = target.name, target.namespace
        if target.subresource == "log":
            store.get(plural, name, namespace)
            return 200, self.api.logs.get(name, "")
        if verb == "list":
            return 200, self._listed(target)
        if verb == "get":
            return 200, store.get(plural, name, namespace)
        if verb == "create":
            return 201, store.create(plural, body, namespace)
        if verb == "update":
            return 200, store.replace(plural, name, body, namespace)
        if verb == "patch":
            if "merge-patch" not in self.headers.get("Content-Type", ""):
                raise ApiError(415, "only merge patches are known here")
            return 200, store.patch(plural, name, body, namespace)
        orphan = body.get("propagationPolicy") == "Orphan"
        if verb == "deletecollection":
            for one in store.find(plural, namespace, **self._selectors()):
                place = one["metadata"].get("namespace", "")
                store.delete(plural, one["metadata"]["name"], place, orphan=orphan)
            return 200, {"kind": "Status", "apiVersion": "v1", "status": "Success"}
        preconditions = body.get("preconditions")
        return 200, store.delete(
            plural, name, namespace, preconditions=preconditions, orphan=orphan
        )

    def _selectors(self) -> dict[str, str]:
        return {
            key: value
            for key, value in self._query.items()
            if key in ("labelSelector", "fieldSelector")
        }

    def _listed(self, target: _Target) -> Json:
        with self.api.store.changed:
            return {
                "kind": f"{target.resource.kind}List",
                "apiVersion": target.resource.api_version,
                "metadata": {"resourceVersion": str(self.api.store.version)},
                "items": self.api.store.find(
                    target.resource.plural, target.namespace, **self._selectors()
                ),
            }

    def _watch(self, target: _Target, call: Call) -> None:
        generation = self.api.generation
        version = int(self._query.get("resourceVersion") or self.api.store.version)
        until = time.monotonic() + float(self._query.get("timeoutSeconds") or 300)
        self.api.record(Call(call.verb, call.resource, call.namespace, call.name, 200))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        store = self.api.store
        try:
            while self.api.generation == generation and time.monotonic() < until:
                with store.changed:
                    changes = store.changes_after(version)
                    if not changes:
                        store.changed.wait(_WATCH_POLL_S)
                        continue
                version = changes[-1].version
                for event in self._events(changes, target):
                    self._chunk(event)
            if self._query.get("allowWatchBookmarks") in ("true", "True"):
                resource = target.resource
                metadata = {"resourceVersion": str(version), "creationTimestamp": None}
                bookmark = {"kind": resource.kind, "apiVersion": resource.api_version}
                self._chunk({"type": "BOOKMARK", "object": {**bookmark, "metadata": metadata}})
        except ApiError as error:
            self._chunk({"type": "ERROR", "object": error.body()})
        if self.api.generation == generation:
            self.wfile.write(b"0\r\n\r\n")

    def _events(self, changes: list[Change], target: _Target) -> Iterator[Json]:
        selectors = self._selectors()
        for change in changes:
            if change.resource != target.resource:
                continue
            if target.namespace not in ("", change.one["metadata"].get("namespace", "")):
                continue
            matched = change.before is not None and matches(change.before, selectors)
            if change.type == "DELETED" or not matches(change.one, selectors):
                if matched:
                    yield {"type": "DELETED", "object": change.one}
            else:
                yield {"type": "MODIFIED" if matched else "ADDED", "object": change.one}

    def _chunk(self, event: Json) -> None:
        line = json.dumps(event).encode() + b"\n"
        self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
        self.wfile.flush()

    def _send(self, status: int, answer: Any, headers: Mapping[str, str] | None = None) -> None:
        is_text = isinstance(answer, str)
        body = answer.encode() if is_text else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if is_text else "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
