"""Messages between workers and keepers, and of keepers among themselves.

A tag that differs from its class's name is what keepers of earlier versions know it by; likewise
the names in ``WIRE_NAMES``.
"""

from __future__ import annotations

import msgspec

from phalanx.checkpoint.format.shard import Sidecar
from phalanx.checkpoint.write.commit import SaveOrder

WIRE_NAMES = {"buffer": "slot", "buffers": "slots", "buffer_bytes": "slot_bytes"}  # on the wire


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot in a keeper's memory, sealed: whole, with its checksums known."""

    job: str
    generation: int
    step: int
    session: str
    rank: int
    world_size: int
    mesh: dict[str, int]
    shard_bytes: int
    replica: bool  # of a rank on another node


def header_of(order: SaveOrder, replica: bool) -> Header:
    """What others are told about a snapshot."""
    draft, side = order.draft, order.sidecar
    return Header(
        job=str(draft.config.get("name", "")),
        generation=draft.generation,
        step=draft.step,
        session=draft.session,
        rank=side.rank,
        world_size=draft.world_size,
        mesh=draft.mesh,
        shard_bytes=side.shard_bytes,
        replica=replica,
    )


class Hello(msgspec.Struct, frozen=True, tag=True, rename=WIRE_NAMES):
    """A worker asks for memory: ``buffers`` snapshots of ``buffer_bytes`` each.

    Memory that a killed worker of this rank left behind is taken over. A descriptor that comes
    along is the lock of the checkpoint's folder, held until the work is done.
    """

    rank: int
    buffer_bytes: int
    buffers: int
    step: int = -1  # that the worker restored: later ones of older generations never happened


class FlushBuffer(msgspec.Struct, frozen=True, tag="Flush", rename=WIRE_NAMES):
    """A buffer is about to be filled; it is the keeper's until it answers.

    What is there is written at once; only a buffer that became full counts.
    """

    buffer: int
    order: SaveOrder


class Filled(msgspec.Struct, frozen=True, tag=True, rename=WIRE_NAMES):
    """So many bytes of a buffer are there."""

    buffer: int
    bytes: int


class Pair(msgspec.Struct, frozen=True, tag=True):
    """Send a replica of this worker's snapshots to another keeper."""

    host: str
    port: int
    token: bytes  # empty: the one that all keepers of the job share
    spare: bool = False  # of a node that stands by: without it, snapshots are safe here alone


class FenceReplicas(msgspec.Struct, frozen=True, tag=True):
    """Take no replicas of older generations any more: this one goes on from what is here."""

    generation: int


class Bye(msgspec.Struct, frozen=True, tag=True):
    """The worker ends as planned; what it handed over is still written."""


class Release(msgspec.Struct, frozen=True, tag=True):
    """Nobody needs the snapshots of this keeper any more."""


class AskSnapshots(msgspec.Struct, frozen=True, tag="Ask"):
    """Which snapshots are there?"""


class Watch(msgspec.Struct, frozen=True, tag=True):
    """Tell of every snapshot that becomes safe, those that are there first."""


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Is anybody there?"""


class Save(msgspec.Struct, frozen=True, tag=True):
    """Write what this node's own ranks have of a step as a checkpoint: no worker is left to."""

    step: int
    folder: str  # of checkpoints


class Shelve(msgspec.Struct, frozen=True, tag=True):
    """Answer for what lies on the disk of this node, too."""

    root: str


class Detail(msgspec.Struct, frozen=True, tag=True):
    """All about one snapshot but its bytes."""

    rank: int
    session: str
    step: int
    on_disk: bool = False


class Fetch(msgspec.Struct, frozen=True, tag=True):
    """Bytes of a snapshot."""

    rank: int
    session: str
    step: int
    offset: int
    length: int
    on_disk: bool = False


class Condemn(msgspec.Struct, frozen=True, tag=True):
    """Somebody read a snapshot that failed its proof: prove it, and have nobody get it again."""

    rank: int
    session: str
    step: int


class Put(msgspec.Struct, frozen=True, tag=True):
    """A replica: its bytes follow."""

    order: SaveOrder
    sidecar: Sidecar  # with checksums


class MemoryGranted(msgspec.Struct, frozen=True, tag="Welcome", rename=WIRE_NAMES):
    """The memory asked for comes as a file descriptor with this message."""

    buffers: list[int]  # in the order of their use: the newest sealed one last
    port: int  # where other keepers reach this one
    token: bytes  # which they must know
    shared: bool = False  # they do: the job's keepers were all given it


class Refused(msgspec.Struct, frozen=True, tag=True):
    """It is not done, and why."""

    problem: str


class Durable(msgspec.Struct, frozen=True, tag=True, rename=WIRE_NAMES):
    """A buffer is free: its shard is on disk (or was to stay in memory), its replica sent."""

    buffer: int
    step: int
    seconds: float


class SaveOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a save."""

    step: int
    path: str
    problem: str = ""  # empty: the checkpoint is complete
    fix: str = ""
    errno: int = 0  # of the operating system, where that refused


class Committed(SaveOutcome, frozen=True, tag=True):
    """The checkpoint of a step is complete."""


class Superseded(msgspec.Struct, frozen=True, tag=True):
    """A newer checkpoint was complete, and this one cleared away, before anybody looked."""

    step: int


class Failed(SaveOutcome, frozen=True, kw_only=True, tag=True, rename=WIRE_NAMES):
    """A snapshot could not be written or committed; ``buffer`` is free, or -1."""

    buffer: int = -1


class Trouble(msgspec.Struct, frozen=True, tag=True):
    """Something that must be heard but costs no checkpoint: a replica or a copy that failed."""

    step: int
    problem: str


class Replicated(msgspec.Struct, frozen=True, tag=True):
    """Another keeper has proved and sealed the replica of a step."""

    step: int


class Acknowledged(msgspec.Struct, frozen=True, tag=True):
    """A prompt snapshot is sealed here and, if ``safe``, at the buddy (where there is one)."""

    step: int
    safe: bool


class Noted(msgspec.Struct, frozen=True, tag=True):
    """The answer to Watch: a snapshot is sealed here and at its buddy, or is such a replica."""

    rank: int
    generation: int
    step: int
    replica: bool


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The answer to Ping."""


class Archived(msgspec.Struct, frozen=True, tag=True):
    """Copying this rank's shard of a step to the second tier is over."""

    step: int
    problem: str = ""  # why it was given up


class KeeperInventory(msgspec.Struct, frozen=True, tag="Inventory"):
    """The answer to AskSnapshots, and how other nodes reach this keeper."""

    headers: list[Header]
    port: int
    token: bytes
    live: bool = False  # the workers that they belong to are still there
    condemned: list[Header] = []  # that failed their proof
    shared: bool = False


class Details(msgspec.Struct, frozen=True, tag=True):
    """The answer to Detail."""

    order: SaveOrder
    sidecar: Sidecar


class Saved(msgspec.Struct, frozen=True, tag=True):
    """The answer to Save; ``problem``: why it is not."""

    path: str
    problem: str = ""


class Judged(msgspec.Struct, frozen=True, tag=True):
    """The answer to Condemn."""

    bad: bool


class SnapshotBytes(msgspec.Struct, frozen=True, tag="Data"):
    """The answer to Fetch; the bytes follow."""

    length: int


class Taken(msgspec.Struct, frozen=True, tag=True):
    """The answer to Put: proved and sealed."""


ToKeeper = (
    Hello | FlushBuffer | Filled | Pair | FenceReplicas | Bye | Release | AskSnapshots | Watch
    | Save | Shelve | Detail | Fetch | Put | Condemn | Ping
)  # fmt: skip
FromKeeper = (
    MemoryGranted | Refused | Durable | Committed | Superseded | Failed | Trouble | Replicated
    | Archived | Acknowledged | Noted | KeeperInventory | Details | SnapshotBytes | Taken | Judged
    | Saved | Pong
)  # fmt: skip
