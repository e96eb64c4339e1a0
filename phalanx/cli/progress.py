"""Bars for whoever waits at a terminal: on standard error, and only when it takes a while."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WAIT_SECONDS = 1.0  # what is done sooner needs no bar
LOOK_SECONDS = 0.2


@contextmanager
def working(text: str, quiet: bool = False) -> Iterator[Callable[[float], None]]:
    """A bar for as long as the block runs; where its share is told, with the time left.

    In a pipe, or with ``quiet``, nothing is shown.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda share: None
        return
    share_done: list[float] = []
    ended = threading.Event()
    shown = threading.Thread(target=_show, args=(text, share_done, ended), daemon=True)
    shown.start()
    try:
        yield lambda share: share_done.__setitem__(slice(None), [share])
    finally:
        ended.set()
        shown.join()


def _show(text: str, share_done: list[float], ended: threading.Event) -> None:
    if ended.wait(WAIT_SECONDS):
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as progress:
        task = progress.add_task(text, total=None)
        while not ended.wait(LOOK_SECONDS):
            if share_done:
                progress.update(task, total=1.0, completed=min(1.0, share_done[0]))
