"""A real etcd on this machine, for tests; they are skipped where it is not installed."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from tests.free_ports import free_ports
from tests.waiting import wait_until

_START_S = 30.0


class EtcdServer:
    """One etcd of its directory; a context manager.

    Args:
        directory: of its files and its log; kept.
        scheme: ``https``: with the certificate of ``arguments``.
        arguments: of the program, besides its addresses.

    Attributes:
        endpoint: of its clients.
    """

    def __init__(
        self, directory: Path, scheme: str = "http", arguments: Sequence[str] = ()
    ) -> None:
        if shutil.which("etcd") is None:
            pytest.skip("etcd is not installed")
        client, peer = free_ports(2, ["127.0.0.1"])
        self._directory = directory
        self.endpoint = f"{scheme}://127.0.0.1:{client}"
        self._command = [
            *("etcd", "--data-dir", str(directory / "data"), "--log-level", "error"),
            *("--listen-client-urls", self.endpoint, "--advertise-client-urls", self.endpoint),
            *("--listen-peer-urls", f"http://127.0.0.1:{peer}"),
            *("--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}"),
            *("--initial-cluster", f"default=http://127.0.0.1:{peer}", *arguments),
        ]

    def __enter__(self) -> Self:
        self._directory.mkdir(parents=True, exist_ok=True)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts it, again too."""
        with (self._directory / "log").open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        if self.endpoint.startswith("http:"):
            wait_until(self._is_healthy, _START_S, "etcd answers")

    def stop(self) -> None:
        """Ends it; its files stay."""
        self.process.kill()
        self.process.wait()

    def all_keys(self) -> set[str]:
        """Every key."""
        everything = {"key": "AA==", "range_end": "AA==", "keys_only": True}
        found = self.call("kv/range", everything).get("kvs", [])
        return {base64.b64decode(each["key"]).decode() for each in found}

    def call(self, verb: str, body: dict[str, Any]) -> Any:
        """An answer of its gateway."""
        request = urllib.request.Request(f"{self.endpoint}/v3/{verb}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=_START_S) as response:
            return json.load(response)

    def clear(self) -> None:
        """Removes every key."""
        self.call("kv/deleterange", {"key": "AA==", "range_end": "AA=="})

    def require_user(self, name: str, password: str) -> None:
        """From now on each call needs a user; this one may change the keys of caches."""
        for user, secret in (("root", "of root"), (name, password)):
            self.call("auth/user/add", {"name": user, "password": secret})
            self.call("auth/role/add", {"name": user})
            self.call("auth/user/grant", {"user": user, "role": user})
        keys = {
            which: base64.b64encode(key).decode()
            for which, key in (
                ("key", b"/trainer-data-cache/"),
                ("range_end", b"/trainer-data-cache0"),
            )
        }
        permission = {"permType": "READWRITE", **keys}
        self.call("auth/role/grant", {"name": name, "perm": permission})
        self.call("auth/enable", {})

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.endpoint}/health", timeout=_START_S) as response:
                return bool(json.load(response)["health"] == "true")
        except OSError:  # urllib's errors are some
            return False
