"""Waits until the shards of a node were moved to other nodes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from cache_client.control.infos import NodeInfo
from cache_protocol.cli.output import size
from cache_protocol.errors import NodeUnavailableError, NotReadyError

_LOOK_EVERY_S = 0.5


def wait_until_drained(
    node: NodeInfo,
    look: Callable[[], Sequence[NodeInfo]],
    deadline_s: float | None,
    on_progress: Callable[[NodeInfo], None] | None = None,
) -> NodeInfo:
    """Waits until a drain is done; returns the node then.

    Args:
        look: the nodes of the cache now.
        deadline_s: to wait; None: without a limit.
        on_progress: called after every look.

    Raises:
        NotReadyError: it is not done by the deadline; says what is left.
        NodeUnavailableError: the node was lost, or its drain was ended.
    """
    deadline = time.monotonic() + (math.inf if deadline_s is None else deadline_s)
    while True:
        if on_progress is not None:
            on_progress(node)
        if not node.alive:
            raise NodeUnavailableError(f"node {node.id} was lost while it was drained")
        if node.drain is None:
            raise NodeUnavailableError(f"the drain of node {node.id} was ended: it takes shards")
        if node.drain.done:
            return node
        if (left_s := deadline - time.monotonic()) <= 0:
            raise NotReadyError(
                f"node {node.id} is not drained within {deadline_s:g} s: {what_is_left(node)}. The "
                "drain continues: drain it again to wait, or undrain it"
            )
        time.sleep(min(_LOOK_EVERY_S, left_s))
        known = {each.id: each for each in look()}
        node = known.get(node.id) or replace(node, alive=False)


def what_is_left(node: NodeInfo) -> str:
    """What a drain has still to move, in words."""
    drain = node.drain
    assert drain is not None
    text = f"{drain.shards_left} shards ({size(drain.bytes_left)}) are still to be moved"
    return f"{text}; {drain.waits}" if drain.waits else text
