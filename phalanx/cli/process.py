"""What a command does to its own process: logging, a fast import of torch."""

from __future__ import annotations

import atexit
import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def log_to_stderr() -> None:
    """Log what a long-running command does, with times."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )


@contextmanager
def collection_paused() -> Iterator[None]:
    """Import torch inside: what an import makes stays, so garbage is sought in vain.

    The search would be a sixth of the import, which is what one waits for longest. At the end of
    the process it is sought after all: libraries (triton's) list what is left then as leaks.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)
        gc.enable()
