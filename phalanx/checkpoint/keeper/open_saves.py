"""What a keeper has begun to write, and takes away where its job ends before it is whole."""

from __future__ import annotations

import shutil
import signal
import threading
from contextlib import suppress
from pathlib import Path

from phalanx.checkpoint.format.manifest import MANIFEST_FILE
from phalanx.checkpoint.format.shard import Sidecar
from phalanx.checkpoint.format.tier import FolderTier
from phalanx.checkpoint.write.commit import SaveOrder, publish_sidecar

ABANDON = signal.SIGUSR1  # tells a keeper to end, and to leave no save that nobody can complete


class OpenSaves:
    """The saves of one keeper that are not over."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unpublished: dict[int, SaveOrder] = {}  # by identity: ranks' orders may be equal
        self._published: dict[int, SaveOrder] = {}
        self._abandoned = False

    def begin(self, order: SaveOrder) -> None:
        """A shard is to be written."""
        if order.write:
            with self._lock:
                self._unpublished[id(order)] = order

    def publish(self, order: SaveOrder, sidecar: Sidecar) -> None:
        """Say that a shard is durable, unless the save was taken away meanwhile."""
        with self._lock:
            if self._abandoned:
                raise OSError("its job is over")
            publish_sidecar(Path(order.path), sidecar)
            if self._unpublished.pop(id(order), None) is not None:
                self._published[id(order)] = order

    def end(self, order: SaveOrder) -> None:
        """It failed, or only other ranks' shards are missing."""
        with self._lock:
            self._unpublished.pop(id(order), None)
            self._published.pop(id(order), None)

    def abandon(self) -> None:
        """Publish nothing more, and take away each save that lacks a shard of this keeper's."""
        with self._lock:
            self._abandoned = True
            lacking = {Path(order.path) for order in self._unpublished.values()}
        for path in lacking:
            take_away(path)

    def commits(self) -> bool:
        """Whether a shard was published whose save may be committed just now."""
        with self._lock:
            return bool(self._published)


def take_away(path: Path) -> None:
    """Remove a checkpoint's folder that nobody can complete."""
    with suppress(OSError):  # another node's keeper was first
        if not (path / MANIFEST_FILE).exists():
            shutil.rmtree(FolderTier(path.parent).doom(path.name))
