"""What every worker process of a pool does first."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading


def follow_parent() -> None:
    """Leave interrupts to the parent, and end when it does, however that happens."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
