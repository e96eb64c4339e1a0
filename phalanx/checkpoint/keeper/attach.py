"""How a rank comes to its keeper and its buddy, and to another keeper when the first is gone."""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

import torch

from phalanx.checkpoint.format.describe import current_rank
from phalanx.checkpoint.format.manifest import CheckpointError
from phalanx.checkpoint.keeper.client import KeeperClient, NoKeeperError
from phalanx.checkpoint.keeper.start import (
    buddies,
    domain_name,
    node_name,
    own_address,
    start_keeper,
)
from phalanx.checkpoint.ranks import Ranks

log = logging.getLogger(__name__)


class KeeperNode(NamedTuple):
    """A node's keeper as the other nodes reach it."""

    name: str
    domain: str
    host: str
    port: int
    token: bytes


class KeeperOptions(NamedTuple):
    """How a keeper is asked for."""

    home: Path
    lease_seconds: float
    buffers: int
    device: torch.device
    overlap: bool


class Attachment:
    """One rank's keeper."""

    def __init__(
        self, ranks: Ranks, folder: Path, keeping: KeeperOptions, shard_bytes: int, lock: int
    ) -> None:
        self.keeping = keeping
        self._ranks, self._folder = ranks, folder
        self._shard_bytes, self._lock = shard_bytes, lock
        self._buddy: KeeperNode | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def attach(self, step: int) -> KeeperClient:
        """Connect to the keeper of this node; collective. NoKeeperError where it has no memory."""
        return self._connect(self._agreed_address(), step)

    def attach_anew(self) -> KeeperClient:
        """To a keeper of this rank alone; talks to no other rank."""
        try:
            kept = self._connect(self._start(), step=-1)
        except (NoKeeperError, OSError) as error:
            raise CheckpointError(self._folder, f"no keeper can be started: {error}") from error
        if self._buddy is not None:
            kept.pair(self._buddy.host, self._buddy.port, self._buddy.token)
        return kept

    def pair(self, kept: KeeperClient, shift: int, spare: str = "") -> None:
        """Tell the keeper which other one, in another failure domain, holds its replicas.

        ``spare``: host:port of the one that does where all ranks are on one node.
        """
        own = KeeperNode(node_name(), domain_name(), own_address(), kept.port, kept.token)
        found = dict.fromkeys(self._ranks.gather(own))
        nodes = list(found) if shift else sorted(found)
        if len(nodes) < 2 and spare:
            host, _, port = spare.rpartition(":")
            kept.pair(host, int(port), b"", spare=True)
            return
        if len(nodes) < 2:
            log.warning("no replicas: all ranks are on one node")
            return
        place = nodes.index(own)
        chosen = (place + shift) % len(nodes)
        buddy = nodes[chosen if shift else buddies([node.domain for node in nodes])[place]]
        kept.pair(buddy.host, buddy.port, buddy.token)
        self._buddy = buddy

    def _agreed_address(self) -> str:
        """The first rank of each node starts its keeper, unless an agent has one for us."""
        nodes = self._ranks.gather(node_name())
        first = nodes.index(nodes[current_rank()])
        address = os.environ.get("PHALANX_KEEPER", "")
        if first == current_rank() and not address:
            try:
                address = self._start()
            except OSError as error:  # the others learn of it when they cannot connect
                log.warning("no keeper can be started: %s", error)
        return self._ranks.gather(address)[first]

    def _start(self) -> str:
        output = self._folder / f"keeper-{node_name()}.log"
        address, self._process = start_keeper(self.keeping.home, self.keeping.lease_seconds, output)
        return address

    def _connect(self, address: str, step: int) -> KeeperClient:
        return KeeperClient(
            address,
            current_rank(),
            self._shard_bytes,
            self.keeping.buffers,
            cuda=self.keeping.device.type == "cuda",
            lock=self._lock,
            step=step,
        )
