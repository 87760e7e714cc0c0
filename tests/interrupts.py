"""Interrupts at the worst moment, which no signal would hit when it should."""

from __future__ import annotations

import threading

import pytest


class Interrupt(BaseException):
    """Stands for KeyboardInterrupt, which would end the run of the tests."""


def interrupt_conditions(patch: pytest.MonkeyPatch) -> None:
    """Has every condition that this thread enters be interrupted when its lock is just taken.

    `threading.Condition` is Python: what is raised in its ``__enter__`` leaves the lock taken.
    """
    here, enter = threading.get_ident(), threading.Condition.__enter__

    def interrupted(condition: threading.Condition) -> bool:
        taken = enter(condition)
        if threading.get_ident() == here:
            raise Interrupt
        return taken

    patch.setattr(threading.Condition, "__enter__", interrupted)
