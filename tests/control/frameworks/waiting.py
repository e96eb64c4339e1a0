"""How a script waits to be killed: not part of what its user would write."""

from __future__ import annotations

import time
from pathlib import Path

MARK = Path("kill-me")


def wait_to_be_killed(step: int, at: int = 10) -> None:
    """From one step on, tell whoever watches, and wait for as long as the mark is there."""
    if step >= at and MARK.exists():
        Path("reached").touch()
        while MARK.exists():
            time.sleep(0.05)
