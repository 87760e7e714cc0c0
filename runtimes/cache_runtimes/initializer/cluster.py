"""The API of the cluster; the only importer of the Kubernetes client here.

Objects are the JSON of the API. A call that the server throttles or fails is repeated until a
deadline; a refused call is an error that names the call.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from kubernetes import config
from kubernetes.client import (
    ApiClient,
    AppsV1Api,
    Configuration,
    CoreV1Api,
    CustomObjectsApi,
    V1DeleteOptions,
    V1Preconditions,
)
from kubernetes.client.exceptions import ApiException
from kubernetes.watch import Watch
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    sleep_using_event,
    stop_before_delay,
    stop_when_event_set,
)
from urllib3.exceptions import HTTPError

from cache_protocol.errors import CacheError, ConfigError, NotReadyError
from cache_protocol.wire.channels import backoff
from cache_runtimes.initializer.cache_health import may_pass
from cache_runtimes.initializer.plan import TRAINER_GROUP, TRAINER_VERSION, Json, Kind

_CONFLICT = 409
_GONE = 410
_NOT_FOUND = 404
_FORBIDDEN = (401, 403)
_REFUSED_BY_ADMISSION = 403
_TRANSIENT = (0, 429, 500, 502, 503, 504)
_BACK_OFF = backoff(0.2, 5.0)
_MAX_RETRY_AFTER_S = 15.0
_CONNECT_TIMEOUT_S = 5.0
_CALL_TIMEOUT_S = 10.0
_LEAST_TIMEOUT_S = 1.0

logger = logging.getLogger(__name__)


class ClusterError(CacheError):
    """The cluster refuses a call, lacks an object, or has another object in its place."""


class StoppedError(Exception):
    """The program was told to end during a call or a wait."""


class WatchExpiredError(Exception):
    """The server no longer knows the changes since a version: list again."""


@dataclass(frozen=True)
class Patience:
    """How long a call may be repeated.

    Attributes:
        until: on the clock of `time.monotonic`.
        stop: set when the program should end.
    """

    until: float
    stop: threading.Event

    @classmethod
    def lasting(cls, seconds: float, stop: threading.Event) -> Patience:
        """A patience that starts now."""
        return cls(time.monotonic() + seconds, stop)

    @property
    def left_s(self) -> float:
        """Seconds until its end; at least 0."""
        return max(0.0, self.until - time.monotonic())

    def pause(self, seconds: float) -> None:
        """Waits.

        Raises:
            StoppedError: the program was told to end.
        """
        if self.stop.wait(min(seconds, self.left_s)):
            raise StoppedError


@dataclass(frozen=True)
class Page:
    """Listed objects, and the version of the list."""

    items: list[Json]
    version: str


def connect(kubeconfig: str | None) -> ApiClient:
    """A client with the settings of the files ``kubeconfig``, or of this pod if that is None.

    Raises:
        ConfigError: no settings are found.
    """
    configuration = Configuration()
    try:
        if kubeconfig is not None:
            config.load_kube_config(kubeconfig, client_configuration=configuration)
        else:
            config.load_incluster_config(client_configuration=configuration)
            # HTTPS_PROXY of this pod is for the source. The client would use it for the API server
            # too, and ignores NO_PROXY.
            configuration.proxy = None
    except config.ConfigException as error:
        place = f"KUBECONFIG={kubeconfig!r}" if kubeconfig else "this is not a pod of a cluster"
        raise ConfigError(f"cannot reach the API server: {place}: {error}") from None
    configuration.retries = False  # this module repeats calls by their status, and logs it
    return ApiClient(configuration)


class Cluster:
    """One namespace of a cluster. Threads may share it.

    Args:
        watch_timeout_s: a watch is renewed after it, in case its connection died silently.
    """

    def __init__(self, api: ApiClient, namespace: str, *, watch_timeout_s: int = 60) -> None:
        self.namespace = namespace
        self._watch_timeout_s = watch_timeout_s
        core, apps, custom = CoreV1Api(api), AppsV1Api(api), CustomObjectsApi(api)
        self._read: dict[Kind, Callable[..., Any]] = {
            Kind.TRAIN_JOB: _of_train_jobs(custom.get_namespaced_custom_object),
            Kind.SERVICE_ACCOUNT: core.read_namespaced_service_account,
            Kind.SERVICE: core.read_namespaced_service,
            Kind.STATEFUL_SET: apps.read_namespaced_stateful_set,
            Kind.POD: core.read_namespaced_pod,
        }
        self._create: dict[Kind, Callable[..., Any]] = {
            Kind.SERVICE_ACCOUNT: core.create_namespaced_service_account,
            Kind.SERVICE: core.create_namespaced_service,
            Kind.STATEFUL_SET: apps.create_namespaced_stateful_set,
        }
        self._delete: dict[Kind, Callable[..., Any]] = {
            Kind.SERVICE_ACCOUNT: core.delete_namespaced_service_account,
            Kind.SERVICE: core.delete_namespaced_service,
            Kind.STATEFUL_SET: apps.delete_namespaced_stateful_set,
        }
        self._list: dict[Kind, Callable[..., Any]] = {
            Kind.STATEFUL_SET: apps.list_namespaced_stateful_set,
            Kind.POD: core.list_namespaced_pod,
            Kind.EVENT: core.list_namespaced_event,
        }

    def get(self, kind: Kind, name: str, patience: Patience) -> Json | None:
        """An object as it is now; None where it does not exist."""
        call = _Call("get", kind, name, self.namespace)
        return self._carry_out(
            call, patience, partial(self._read[kind], name, self.namespace), _NOT_FOUND
        )

    def create(self, kind: Kind, body: Json, patience: Patience) -> Json | None:
        """The created object; None where its name exists.

        This call may have created that one: it is repeated when an answer is lost.
        """
        call = _Call("create", kind, body["metadata"]["name"], self.namespace)
        return self._carry_out(
            call, patience, partial(self._create[kind], self.namespace, body), _CONFLICT
        )

    def delete(self, kind: Kind, name: str, uid: str, patience: Patience) -> bool:
        """Deletes the object ``uid``, and later the objects that it owns.

        Returns:
            False: the object does not exist, or another object has its name.
        """
        call = _Call("delete", kind, name, self.namespace)
        options = V1DeleteOptions(
            preconditions=V1Preconditions(uid=uid), propagation_policy="Background"
        )
        send = partial(self._delete[kind], name, self.namespace, body=options)
        return self._carry_out(call, patience, send, _NOT_FOUND, _CONFLICT) is not None

    def list(self, kind: Kind, selectors: Mapping[str, str], patience: Patience) -> Page:
        """The objects of ``selectors`` (``field_selector``, ``label_selector``)."""
        call = _Call("list", kind, None, self.namespace)
        send = partial(self._list[kind], self.namespace, **selectors)
        answer = self._carry_out(call, patience, send)
        assert answer is not None
        return Page(answer.get("items") or [], answer["metadata"]["resourceVersion"])

    def watch(
        self, kind: Kind, selectors: Mapping[str, str], version: str
    ) -> Iterator[tuple[str, Json]]:
        """The changes after ``version``: ADDED, MODIFIED, DELETED or BOOKMARK, and the object.

        It ends after ``watch_timeout_s``.

        Raises:
            WatchExpiredError: list again.
            ClusterError: the server refuses the watch.
            OSError: the connection broke, or the server refuses the watch for now.
        """
        call = _Call("watch", kind, None, self.namespace)
        events = Watch(return_type="object").stream(
            self._list[kind],
            self.namespace,
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=self._watch_timeout_s,
            _request_timeout=(_CONNECT_TIMEOUT_S, self._watch_timeout_s + _CALL_TIMEOUT_S),
            **selectors,
        )
        try:
            yield from ((event["type"], event["object"]) for event in events if event is not None)
        except ApiException as error:
            if error.status == _GONE:
                raise WatchExpiredError(_message(error)) from None
            if error.status in _TRANSIENT:
                raise OSError(_message(error)) from None
            raise call.refused(error) from None
        except HTTPError as error:
            raise OSError(str(error)) from None

    def _carry_out(
        self, call: _Call, patience: Patience, send: Callable[..., Any], *none_at: int
    ) -> Json | None:
        """The answer to a call, or None if its status is one of ``none_at``.

        Raises:
            StoppedError: the program was told to end before an answer.
            NotReadyError: no answer in time, only transient failures.
            ClusterError: the server refuses the call.
        """
        retrying = Retrying(
            retry=retry_if_exception(_is_transient),
            wait=_pause,
            stop=stop_before_delay(patience.left_s) | stop_when_event_set(patience.stop),
            sleep=sleep_using_event(patience.stop),
            before_sleep=call.log_failure,
            reraise=True,
        )
        try:
            answer: Json = retrying(_answer, send, patience)
            return answer
        except ApiException as error:
            if error.status in none_at:
                return None
            if not _is_transient(error):
                raise call.refused(error) from None
            reason = _message(error)
        except HTTPError as error:
            reason = str(error)
        if patience.stop.is_set():
            raise StoppedError
        raise NotReadyError(f"the API server did not {call} in time: {reason}")


def _answer(send: Callable[..., Any], patience: Patience) -> Json:
    """The JSON that the server answers, not the client's models."""
    timeout_s = max(_LEAST_TIMEOUT_S, min(_CALL_TIMEOUT_S, patience.left_s))
    timeouts_s = (min(_CONNECT_TIMEOUT_S, timeout_s), timeout_s)
    answer = send(_preload_content=False, _request_timeout=timeouts_s)
    decoded: Json = json.loads(answer.data)  # read within the retries: it may break off
    return decoded


@dataclass(frozen=True)
class _Call:
    verb: str
    kind: Kind
    name: str | None
    namespace: str

    def __str__(self) -> str:
        what = self.kind.plural if self.name is None else f"{self.kind.plural}/{self.name}"
        return f"{self.verb} {what} in namespace {self.namespace}"

    def refused(self, error: ApiException) -> ClusterError:
        if error.status in _FORBIDDEN:
            return ClusterError(f"not allowed to {self} ({error.status}): {_message(error)}")
        return ClusterError(f"the API server refused to {self} ({error.status}): {_message(error)}")

    def log_failure(self, state: RetryCallState) -> None:
        error = _failure_of(state)
        reason = _message(error) if isinstance(error, ApiException) else str(error)
        pause_s = state.next_action.sleep if state.next_action is not None else 0.0
        logger.warning("repeating in %.1f s: %s failed: %s", pause_s, self, reason)


def _of_train_jobs(read: Callable[..., Any]) -> Callable[..., Any]:
    def read_train_job(name: str, namespace: str, **options: Any) -> Any:
        return read(
            TRAINER_GROUP, TRAINER_VERSION, namespace, Kind.TRAIN_JOB.plural, name, **options
        )

    return read_train_job


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, ApiException):
        if error.status == _REFUSED_BY_ADMISSION and may_pass(_message(error)):  # pyright: ignore
            return True
        return error.status in _TRANSIENT  # pyright: ignore[reportAttributeAccessIssue]
    return isinstance(error, HTTPError)


def _pause(state: RetryCallState) -> float:
    """Seconds before the next attempt: the larger of the back-off and the server's request."""
    asked = getattr(_failure_of(state), "headers", None) or {}
    try:
        asked_s = float(asked.get("Retry-After", 0))
    except ValueError:  # a date; the API server sends seconds
        asked_s = 0.0
    return max(_BACK_OFF(state), min(asked_s, _MAX_RETRY_AFTER_S))


def _failure_of(state: RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome is not None else None


def _message(error: ApiException) -> str:
    """The message of the server, in one line."""
    try:
        said = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else error.body
        said = body or error.reason or f"status {error.status}"
    return " ".join(str(said).split())[:2000]
