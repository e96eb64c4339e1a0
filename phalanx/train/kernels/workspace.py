"""The folder of this node in which compilers find and leave kernels while jobs run.

It is filled from the store before the first step, and emptied by the next process that finds it
unused: what a killed process left half-written is never loaded.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from phalanx.train.kernels.place import locked, make_private, try_lock
from phalanx.train.kernels.store import KernelStore, files_in

FILL_SECONDS = 60.0  # to wait for another process that fills the folder
LEAST_BYTES = 1 << 30  # free, for what is compiled
SHARED = ".shared"  # names of what came from a bundle, or is in one
PLACES = (tempfile.gettempdir, lambda: "/dev/shm")

log = logging.getLogger(__name__)


class KernelWorkspace:
    """In use from ``open`` to the end of the process."""

    def __init__(self, base: Path, key: str, store: KernelStore) -> None:
        self.base, self.folder, self.store = base, base / key, store
        self._use = -1

    def open(self) -> int:
        """Fill the folder; returns how many kernels' files came from the store."""
        make_private(self.base)
        with locked(self._lock("fill"), FILL_SECONDS) as alone:
            if not alone:
                log.warning("kernels: another process has filled %s for a minute", self.folder)
            self._use = os.open(self._lock("use"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if alone and try_lock(self._use, fcntl.LOCK_EX):
                shutil.rmtree(self.folder, ignore_errors=True)
                self._remove_others()
            try_lock(self._use, fcntl.LOCK_SH)
            make_private(self.folder)
            return self._fill() if alone else 0

    def share(self) -> int:
        """Put what was compiled since into the store; returns the bytes of the new bundle.

        Not while something is being compiled: there is a next time.
        """
        with locked(self._lock("fill"), FILL_SECONDS) as alone:
            known = self._known()
            fresh = sorted(name for name in files_in(self.folder) if name not in known)
            if not alone or not fresh or self._compiling():
                return 0
            for name in set(self.store.names()) - known:
                with suppress(OSError):  # damaged, or removed meanwhile
                    known |= {name, *self.store.held(name)}
            fresh = [name for name in fresh if name not in known]
            size = self.store.publish(fresh, self.folder) if fresh else 0
            self._know(known | set(fresh))
            return size

    def _fill(self) -> int:
        known, count = self._known(), 0
        for name in self.store.names():
            if name in known:
                continue
            try:
                held = self.store.unpack(name, self.folder)
            except OSError as error:
                log.warning("kernels of an earlier start are not used: %s", error)
                continue
            known |= {name, *held}
            count += len(held)
        self._know(known)
        return count

    def _compiling(self) -> bool:
        """Whether a C++ compiler writes into the folder now."""
        return any(_is_held(path) for path in (self.folder / "locks").glob("*.lock"))

    def _remove_others(self) -> None:
        """Folders of other versions that nobody uses."""
        for path in self.base.glob("*.use"):
            if path == self._lock("use") or _is_held(path):
                continue
            shutil.rmtree(self.base / path.stem, ignore_errors=True)

    def _lock(self, what: str) -> Path:
        return self.base / f"{self.folder.name}.{what}"

    def _known(self) -> set[str]:
        try:
            return set((self.folder / SHARED).read_text().splitlines())
        except FileNotFoundError:
            return set()

    def _know(self, names: set[str]) -> None:
        draft = self.folder / f"{SHARED}.{os.getpid()}"
        draft.write_text("\n".join(sorted(names)))
        draft.replace(self.folder / SHARED)


def find_base() -> Path:
    """The first place with room; the first one where there is none."""
    places = [Path(place()) for place in PLACES]
    named = f"phalanx-kernels-{os.geteuid()}"
    for place in places:
        if place.is_dir() and shutil.disk_usage(place).free >= LEAST_BYTES:
            return place / named
    log.warning("kernels: less than %.0f GB are free in %s", LEAST_BYTES / 1e9, places[0])
    return places[0] / named


def _is_held(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)
