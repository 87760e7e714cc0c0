"""Files of the Hugging Face Hub, through fsspec's filesystem ``hf``.

It comes from fsspec's registry, so another filesystem can be registered under that name.
huggingface_hub retries only some requests: this module retries all.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    stop_after_delay,
)

from cache_protocol.errors import LoadError, RequestError, missing_package
from cache_protocol.wire.channels import backoff
from cache_server.egress import gate as gates
from cache_server.egress.addresses import DEFAULT_PORTS
from cache_server.egress.gate import Pass
from cache_server.object_stores.client import Location, check_unchanged
from cache_server.object_stores.connections import (
    MAX_BACKOFF_S,
    MAX_RETRIES,
    READ_TIMEOUT_S,
    RETRY_TIMEOUT_S,
    check_endpoint,
    refuse_foreign,
    shown_endpoint,
)
from cache_server.object_stores.errors import Place, store_error
from cache_server.object_stores.options import number_setting, store_settings
from cache_server.secrets.redaction import secret_values
from cache_server.source.outages import load_error, may_pass
from cache_server.source.pinned import SourceFile

SCHEME = "hf"
_HOST = "https://huggingface.co"
_KINDS = ("datasets", "spaces", "models", "buckets")
_PIECE_BYTES = 16 * 1024 * 1024
# huggingface_hub's errors, and what its filesystem says of a path that it has not listed.
_ABSENT = {
    "RepositoryNotFoundError": "(repository not found)",
    "RevisionNotFoundError": "(revision not found)",
}
logger = logging.getLogger(__name__)
_limiting = threading.Lock()  # setting a factory closes the clients of others


def hub_location(uri: str, options: Mapping[str, str]) -> Location:
    """The repository and the path of a URI; ``hf://org/name`` is a dataset.

    Raises:
        RequestError: for a URI without a repository.
    """
    parts = uri.partition("://")[2].split("/")
    if parts[0] not in _KINDS:
        parts.insert(0, "datasets")
    if len(parts) < 3 or not all(parts[1:3]):
        raise RequestError(f"source {uri!r} names no repository: hf://datasets/ORG/NAME/PATH")
    if "@" not in parts[2] and (revision := options.get("revision")):
        parts[2] += f"@{revision.replace('/', '%2F')}"
    repository = "/".join(parts[:3])
    return Location("hf", f"hf://{repository}/", repository, "/".join(parts[3:]))


class HubClient:
    """Reads one repository; the counterpart of `ObjectClient`."""

    lists = True

    def __init__(
        self, location: Location, options: Mapping[str, str], secrets: Mapping[str, str]
    ) -> None:
        settings = store_settings(SCHEME, options, secrets)
        _check_packages()
        self._base = location.base
        self._token = settings.get("token")
        environ = from_env()
        self._endpoint = settings.get("endpoint") or environ.get("HF_ENDPOINT")
        host = self._endpoint or _HOST
        check_endpoint(host)
        self._place = Place(location.bucket, shown_endpoint(host), "repository")
        self._has_password = shown_endpoint(host) != host
        self._retrying = Retrying(
            stop=stop_after_attempt(1 + int(number_setting(settings, "max_retries", MAX_RETRIES)))
            | stop_after_delay(number_setting(settings, "retry_timeout_s", RETRY_TIMEOUT_S)),
            wait=backoff(0.2, MAX_BACKOFF_S),
            retry=retry_if_exception(may_pass),
            before_sleep=self._log_retry,
            reraise=True,
        )
        self._secret = secret_values(secrets, environ)
        self._pass = _pass_for(environ.get("HF_ENDPOINT", ""))
        if self._pass is not None:
            refuse_foreign(SCHEME, settings, environ)

    def __repr__(self) -> str:
        return f"HubClient({self._base!r})"

    def _log_retry(self, state: RetryCallState) -> None:
        """Says at the first failure why nothing happens: the retries take half a minute."""
        error = state.outcome.exception() if state.outcome is not None else None
        if error is not None and state.attempt_number == 1:
            logger.warning("trying again: %s", self._failure(error, self._base))

    def head(self, key: str) -> SourceFile | None:
        """The file at that path; None if there is none or it is a directory."""
        uri = self._base + key
        try:
            info = self._info(uri)
        except FileNotFoundError as error:
            self._check_repository(error, uri)
            return None
        except Exception as error:
            raise self._failure(error, uri) from None
        return _file(info) if info["type"] == "file" else None

    def _info(self, uri: str) -> dict[str, Any]:
        files = self._files()

        def asked() -> dict[str, Any]:
            # Only the expanded answer names the content.
            found: dict[str, Any] = self._retrying(
                files.info, _path(uri), refresh=True, expand_info=True
            )
            return found

        try:
            return asked()
        except FileNotFoundError:
            # The cached listing may be too old to have the file. It is kept for reads, which would
            # otherwise list the file's directory.
            files.invalidate_cache()
            return asked()

    def walk(self, prefix: str, *, deep: bool) -> Iterator[SourceFile]:
        """The files below ``prefix``, in no order."""
        uri = (self._base + prefix).rstrip("/")
        depth = None if deep else 1
        try:
            found = self._retrying(
                self._files().find, _path(uri), maxdepth=depth, detail=True, refresh=True
            )
        except FileNotFoundError as error:
            self._check_repository(error, uri)
            return
        except Exception as error:
            raise self._failure(error, uri) from None
        yield from (_file(info) for info in found.values())

    def read(self, file: SourceFile, span: tuple[int, int] | None) -> Iterator[bytes]:
        """The bytes of ``file``, or of a half-open range, in pieces; one request each.

        Raises:
            LoadError: also when the file is not the one that was planned.
        """
        yield from self._pieces(file, *(span or (0, file.size)))
        # Afterwards, because it may change between two pieces.
        self._check_unchanged(file)

    def _check_unchanged(self, file: SourceFile) -> None:
        now = self.head(file.path.removeprefix(self._base))
        if now is None:
            raise LoadError(f"source {file.path} does not exist in {self._place}")
        check_unchanged(file, now)

    def _pieces(self, file: SourceFile, start: int, stop: int) -> Iterator[bytes]:
        try:
            # A cache would read beyond the range. The size saves a listing of the directory.
            with self._files().open(
                _path(file.path), "rb", cache_type="none", size=file.size
            ) as opened:
                opened.seek(start)
                while start < stop:
                    piece = self._retrying(opened.read, min(_PIECE_BYTES, stop - start))
                    if not piece:
                        break
                    start += len(piece)
                    yield piece
        except GeneratorExit:
            raise
        except Exception as error:
            if not may_pass(error):  # such as for a file that is shorter now
                self._check_unchanged(file)
            raise self._failure(error, file.path) from None

    def _files(self) -> Any:
        import fsspec

        # fsspec keeps one for each thread and token.
        settings = {"token": self._token, "endpoint": self._endpoint}
        given = {name: value for name, value in settings.items() if value is not None}
        files = fsspec.filesystem(SCHEME, **given)
        if type(files).__module__.startswith("huggingface_hub"):  # skip any other registered one
            _limit_waits("" if self._pass is None else self._pass.url)
            if self._has_password:
                # Its warnings quote addresses. It sets a level itself, as it is imported.
                logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        return files

    def _check_repository(self, error: FileNotFoundError, uri: str) -> None:
        """Raises a `LoadError` if this reader sees no such repository or revision."""
        for name, words in _ABSENT.items():
            if words in str(error):
                raise self._absent(name, uri)

    def _absent(self, name: str, uri: str) -> LoadError:
        if name == "RevisionNotFoundError":
            reason = f"{self._place} has no such revision"
        else:
            reason = f"{self._place} was not found, or is private: check its name and the token"
        return LoadError(f"source {uri!r} does not exist: {reason}")

    def _failure(self, error: BaseException, uri: str) -> LoadError:
        if self._pass is not None and (unreachable := self._pass.failure()) is not None:
            return load_error(f"cannot read {uri}: {unreachable}", unreachable)
        status = getattr(getattr(error, "response", None), "status_code", None)
        name = type(error).__name__
        if name in _ABSENT and status == HTTPStatus.NOT_FOUND:  # for a 401 as well
            return self._absent(name, uri)
        text = f"status code: {status}" if status else f"{name}: {error}"
        known = OSError(text)
        known.__cause__ = error
        return store_error(known, uri, self._place, self._secret)


def _check_packages() -> None:
    """Raises a `RequestError` where nothing reads ``hf://`` paths."""
    try:
        import fsspec

        fsspec.get_filesystem_class(SCHEME)
    except ImportError as error:
        # fsspec does not name the package that a filesystem needs.
        error.name = error.name or "huggingface_hub"
        message = missing_package(error, f"store {SCHEME}://", "hub")
        raise RequestError(f"{message} on every node") from None


def from_env() -> dict[str, str]:
    """The variables by which huggingface_hub finds the Hub and its token."""
    return {
        name: text
        for name, text in os.environ.items()
        if name.startswith(("HF_", "HUGGING_FACE_HUB_"))
    }


def _pass_for(endpoint: str) -> Pass | None:
    """What lets the one client of this process reach the Hub, and what it redirects to.

    Args:
        endpoint: of the Hub in the environment, which is trusted; or empty.
    """
    if (gate := gates.current()) is None:
        return None
    trusted = []
    if endpoint:
        parts = urlsplit(endpoint)
        trusted = [(parts.hostname or "", parts.port or DEFAULT_PORTS[parts.scheme])]
    return gate.pass_for({}, {}, trusted)


def _limit_waits(proxy_url: str) -> None:
    """Sets a time limit, and a proxy, for all requests of this process to the Hub.

    huggingface_hub sets no limit when it lists files or looks one up.

    Args:
        proxy_url: empty: that of the environment.
    """
    import huggingface_hub

    with _limiting:
        usual = huggingface_hub.get_session()
        limit = _LimitedWait(proxy_url)
        others = [hook for hook in usual.event_hooks["request"] if type(hook) is not _LimitedWait]
        if limit in usual.event_hooks["request"]:
            return
        limited = {**usual.event_hooks, "request": [*others, limit]}
        huggingface_hub.set_client_factory(
            lambda: type(usual)(
                event_hooks=limited,  # type: ignore[arg-type]  # it is a copy of its own
                follow_redirects=usual.follow_redirects,
                timeout=usual.timeout,
                # If it is given, the environment names no proxy and no exception.
                proxy=proxy_url or None,
            )
        )


@dataclass(frozen=True)
class _LimitedWait:
    """Limits the waits of a request.

    Attributes:
        proxy_url: of the client that has this hook.
    """

    proxy_url: str = field(repr=False)

    def __call__(self, request: Any) -> None:
        given = request.extensions["timeout"]  # of each of connect, read, write and pool
        for what, limit_s in given.items():
            given[what] = READ_TIMEOUT_S if limit_s is None else limit_s


def _path(uri: str) -> str:
    return uri.partition("://")[2]


def _file(info: Mapping[str, Any]) -> SourceFile:
    lfs = info.get("lfs") or {}
    etag = lfs.get("sha256") or info.get("blob_id") or info.get("xet_hash") or ""
    moment = info.get("mtime") or info.get("created") or 0
    seconds = moment.timestamp() if isinstance(moment, datetime) else moment
    mtime_ns = 0 if etag else int(seconds) * 10**9
    return SourceFile(f"hf://{info['name'].lstrip('/')}", info["size"], mtime_ns, etag)
