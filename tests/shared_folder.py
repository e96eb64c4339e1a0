"""What several files of tests would each make alike, made once for all that run side by side."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "TESTS_SHARED_FOLDER"  # set by `python -m tests.run`


def made_once(name: str, alone: Path, make: Callable[[Path], Path]) -> Path:
    """What ``make`` makes below a folder; nobody changes it. ``alone``: where nothing is shared."""
    shared = os.environ.get(VARIABLE)
    if shared is None:
        return make(alone)
    folder = Path(shared) / hashlib.sha256(name.encode()).hexdigest()[:16]
    folder.mkdir(exist_ok=True)
    made = folder / "made"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            made.write_text(str(make(folder)))
    return Path(made.read_text())


@contextmanager
def network(*, changes: bool = False) -> Iterator[None]:
    """This machine's network cards, for tests that add some, or that must not see that.

    Chromium gives up everything that it loads when a card comes or goes.
    """
    shared = os.environ.get(VARIABLE)
    if shared is None:
        yield
        return
    with (Path(shared) / "network").open("w") as lock:
        # Who waits keeps the gate, so that those who come later do not go first for ever.
        with (Path(shared) / "network-gate").open("w") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(lock, fcntl.LOCK_EX if changes else fcntl.LOCK_SH)
        yield
