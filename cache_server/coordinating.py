"""The coordinator of this process, while it has one: made, started and ended as a whole."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack

from cache_protocol.errors import NodeUnavailableError
from cache_protocol.wire.credentials import Credentials
from cache_server.coordination.catalogue import Catalogue
from cache_server.coordination.coordinator import Coordinator
from cache_server.node.second_reader import SecondReader

logger = logging.getLogger(__name__)


class Coordinating:
    """Holds the coordinator of this process. Thread-safe.

    Args:
        make: a coordinator of a catalogue, in a term.
        credentials: of this node.
        may_lead: whether this node leads now; a coordinator counts only while it does.
    """

    def __init__(
        self,
        make: Callable[[Catalogue, int], Coordinator],
        credentials: Credentials,
        may_lead: Callable[[], bool] = lambda: True,
    ) -> None:
        self._make = make
        self._credentials = credentials
        self._may_lead = may_lead
        self._lock = threading.Lock()
        self._coordinator: Coordinator | None = None
        self._parts = ExitStack()
        self._listener: Callable[[], None] = lambda: None

    def __enter__(self) -> Coordinating:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def coordinator(self) -> Coordinator | None:
        """The coordinator; None: this node does not lead now."""
        coordinator = self._coordinator
        return coordinator if coordinator is not None and self._may_lead() else None

    def required(self) -> Coordinator:
        """The coordinator.

        Raises:
            NodeUnavailableError: this node does not lead now.
        """
        if (coordinator := self.coordinator) is None:
            raise NodeUnavailableError(
                "this node does not coordinate the cache now: ask a node again which one does"
            )
        return coordinator

    def listen(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` when the nodes have something new to do."""
        self._listener = callback

    def begin(self, catalogue: Catalogue, term: int = 0, silent_s: float = 0.0) -> Coordinator:
        """Makes the coordinator and its second reader; one that there was has ended before.

        Args:
            silent_s: for which no coordinator was heard; see `Membership.count_silence`.

        Raises:
            ConfigError: the catalogue cannot be read.
        """
        coordinator = self._make(catalogue, term)
        coordinator.state.membership.count_silence(silent_s)
        coordinator.listen(lambda: self._listener())
        with self._lock, ExitStack() as parts:
            parts.callback(coordinator.close)
            reader = parts.enter_context(SecondReader(coordinator, self._credentials))
            reader.start()
            self._parts = parts.pop_all()
            self._coordinator = coordinator
        return coordinator

    def end(self) -> None:
        """Ends the coordinator, if there is one: watches end, and nothing is decided any more."""
        with self._lock:
            self._coordinator = None
            self._parts.close()
