"""Processes that end with whoever started them, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

SET_PARENT_DEATH_SIGNAL = 1


def follow(parent: int, number: int = signal.SIGTERM) -> None:
    """Have the kernel signal this process when its parent ends; it may have ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
