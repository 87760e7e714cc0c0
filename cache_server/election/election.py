"""The election of one node: the parts that make it follow the coordinator, or become it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

from cache_protocol.errors import CacheError
from cache_protocol.wire.credentials import Credentials
from cache_server.coordinating import Coordinating
from cache_server.coordination.catalogue import Catalogue
from cache_server.coordination.coordinator import Coordinator
from cache_server.election.elected_link import ElectedLink
from cache_server.election.elector import Elector
from cache_server.election.objects import ElectionStore
from cache_server.election.shared_catalogue import SharedCatalogue

logger = logging.getLogger(__name__)


class Election:
    """Elects among the nodes with the same Lease. From `start` to `close`; thread-safe.

    Args:
        objects: the Lease, and the catalogue.
        me: identity of this process; see `lease.identity`.
        make: a coordinator of a catalogue, in a term.
        credentials: of this node.

    Attributes:
        own: the coordinator of this process, while it leads.
        link: to the coordinator.
    """

    def __init__(
        self,
        objects: ElectionStore,
        me: str,
        make: Callable[[Catalogue, int], Coordinator],
        credentials: Credentials,
    ) -> None:
        self._objects = objects
        self._on_silence: Callable[[], None] = lambda: None
        self.own = Coordinating(make, credentials, lambda: self._elector.leads())
        self.link = ElectedLink(self.own, credentials)
        self._wins = 0  # and losses: what was begun after an earlier one is of no use
        self._lock, self._opens = threading.Lock(), threading.Lock()
        self._elector = Elector(
            objects,
            me,
            is_heard=self.link.is_heard,
            on_holder=self._follow,
            on_win=self._win,
            on_loss=self._lose,
        )

    def __enter__(self) -> Election:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, on_silence: Callable[[], None]) -> None:
        """Begins to look at the Lease.

        Args:
            on_silence: called when the coordinator is not heard, or is another one.
        """
        self._on_silence = on_silence
        self._elector.start()

    def close(self) -> None:
        """Gives the Lease up, if this process has it: another node takes it at once."""
        self._elector.close()
        self._lose()
        self.link.follow("")

    def _follow(self, location: str) -> None:
        self._on_silence()
        self.link.follow(location)

    def _win(self, silent_s: float) -> None:
        self._on_silence()
        self.link.follow("")
        with self._lock:
            self._wins += 1
            win = self._wins
        # Not in the thread that renews: a large catalogue takes seconds.
        arguments = win, silent_s
        threading.Thread(target=self._begin, args=arguments, name="lead", daemon=True).start()

    def _begin(self, win: int, silent_s: float) -> None:
        try:
            with self._opens:
                store = SharedCatalogue(
                    self._objects,
                    lambda: win == self._wins and self._elector.leads(),
                    partial(self._resign, win),
                )
                with self._lock:
                    if win == self._wins:
                        self.own.begin(Catalogue(store), store.term, silent_s)
            logger.info("coordinates the cache term=%d", store.term)
        except (CacheError, OSError, ValueError) as error:
            logger.error("cannot coordinate the cache reason=%s", error)
            self._resign(win)
        except Exception:
            logger.exception("cannot coordinate the cache")
            self._resign(win)

    def _resign(self, win: int) -> None:
        """Gives the Lease up; not if it was won again: then only an earlier lead has ended."""
        if win == self._wins:
            self._elector.resign()

    def _lose(self) -> None:
        with self._lock:
            self._wins += 1
            self.own.end()
