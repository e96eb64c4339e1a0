"""What the ranks learn of each other before they write: once a run, or once a synchronous save."""

from __future__ import annotations

import datetime
import secrets
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from phalanx.checkpoint.format.describe import Description, current_rank, world_size
from phalanx.checkpoint.format.geometry import RankGroup, form_groups
from phalanx.checkpoint.format.manifest import VERSION, Extra, Manifest
from phalanx.checkpoint.format.shard import Sidecar
from phalanx.checkpoint.ranks import Ranks
from phalanx.checkpoint.write.snapshot import ShardSnapshot


class Arrangement(NamedTuple):
    """Who writes what, under which name."""

    description: Description
    snapshot: ShardSnapshot
    groups: tuple[RankGroup, ...]
    session: str
    total_bytes: int  # of all ranks' shards

    @property
    def own_table(self) -> bytes:
        """The table of this rank's group, if it is the one that writes it."""
        first = any(current_rank() == group.ranks[0][0] for group in self.groups)
        return self.description.encoded if first else b""

    def draft(self, step: int, extra: Extra) -> Manifest:
        """All of a manifest but its shards."""
        return Manifest(
            version=VERSION,
            step=step,
            generation=extra.generation,
            tokens=extra.tokens,
            cursor=extra.cursor,
            mesh=extra.mesh,
            world_size=world_size(),
            config_hash=extra.config_hash,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            session=self.session,
            groups=self.groups,
            config=extra.config,
        )

    def sidecar(self, step: int, extra: Extra) -> Sidecar:
        """All of this rank's sidecar but the checksums."""
        return Sidecar(
            rank=current_rank(),
            step=step,
            generation=extra.generation,
            session=self.session,
            shard_bytes=self.snapshot.bytes,
            header_bytes=len(self.snapshot.header),
            rng=extra.rng,
        )


def arrange(ranks: Ranks, path: Path, tensors: dict[str, Tensor]) -> Arrangement:
    """Learn what all ranks hold, as digests, and agree on the name of this writing; collective."""
    with ranks.together(path):
        description = Description(tensors)
    everyone = ranks.gather((description.digest, description.stand.bases, secrets.token_hex(4)))
    groups = form_groups((digest, bases) for digest, bases, _ in everyone)
    mine = next(group for group in groups if group.table == description.digest)
    snapshot = ShardSnapshot(description, mine)
    total_bytes = sum(ranks.gather(snapshot.bytes))
    return Arrangement(description, snapshot, groups, everyone[0][2], total_bytes)
