"""Looking at checkpoints: what is where, and what each says about itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from phalanx.checkpoint.format.folder import read_bad
from phalanx.checkpoint.format.manifest import MANIFEST_FILE, SEAL, CheckpointError
from phalanx.checkpoint.format.tier import (
    BAD_FILE,
    DOOMED,
    PIN_FILE,
    VERIFIED_FILE,
    ObjectTier,
    Tier,
    open_tier,
    step_of,
)
from phalanx.checkpoint.write.node_disk import RECORD_SUFFIX, records_in

# Of a folder of checkpoints, a run, runs of a name, all runs, and what they lie in; an archive has
# no rooms in its runs.
ROOMS = ("*", "checkpoints/*", "*/checkpoints/*", "*/*/checkpoints/*", "*/*/*/checkpoints/*")
LEVELS = (*ROOMS, "*/*", "*/*/*")


class ListedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint in a list."""

    path: str
    step: int
    generation: int = 0
    tokens: int = 0
    bytes: int = 0
    ranks: int = 0  # of the run that saved it
    mesh: dict[str, int] = {}  # of that run
    shards: int = 0  # files that its tensors lie in
    created: str = ""
    age_seconds: float = 0.0
    pinned: bool = False
    verified: str = ""  # when every byte was last proved; UTC, ISO 8601
    bad: bool = False  # it failed its proof, then or on loading
    parts: int = 0  # ranks whose shards lie here, of a node's own disk; they are no whole
    problems: list[str] = []  # why it is not to be trusted, so far as is known
    notes: list[str] = []


def find(where: str) -> Iterator[tuple[Tier, str]]:
    """Checkpoints at a place: one, a folder of them, a run, a folder of runs; incomplete too.

    Raises CheckpointError where there is no such place.
    """
    if "://" in where:
        yield from _find_objects(where.rstrip("/"))
        return
    path = Path(where)
    if not path.is_dir():
        problem = "is a file, no folder" if path.exists() else "there is no such folder"
        raise CheckpointError(where, problem, "name a checkpoint, a run, or a folder of runs")
    if _is_checkpoint(path):
        path = path if path.name else path.absolute()
        yield open_tier(path.parent), path.name
        return
    with os.scandir(path):  # a glob passes over what it may not read
        folders: dict[Path, None] = {}
    for pattern in LEVELS:
        folders |= dict.fromkeys(sorted(filter(_is_checkpoint, path.glob(pattern))))
        if any(step_of(below.name) >= 0 for below in folders):  # one that was renamed hides no run
            break
    yield from ((open_tier(below.parent), below.name) for below in folders)


def _is_checkpoint(path: Path) -> bool:
    """A step's folder, or one with another name that holds a manifest of ours."""
    if step_of(path.name) >= 0:
        return path.is_dir()
    if path.name.endswith(DOOMED):
        return False
    try:
        with (path / MANIFEST_FILE).open("rb") as file:
            return file.read(len(SEAL)) == SEAL
    except OSError:
        return False


def _find_objects(where: str) -> Iterator[tuple[Tier, str]]:
    root, _, last = where.rpartition("/")
    if step_of(last) >= 0:
        yield open_tier(root), last
        return
    places = [where]
    for _ in range(3):  # a run's, those of a name, those of all names
        tiers = [ObjectTier(place) for place in places]
        if found := [(tier, name) for tier in tiers for name in tier.names()]:
            yield from found
            return
        places = [f"{tier.where}/{name}" for tier in tiers for name in tier.folders()]


def describe(tier: Tier, name: str) -> ListedCheckpoint:
    """What a checkpoint says about itself; nothing is proved but the manifest."""
    path, files = f"{tier.where}/{name}", tier.files(name)
    try:
        manifest = tier.source(name).manifest
    except (CheckpointError, OSError) as error:
        if any(file.endswith(RECORD_SUFFIX) for file in files):
            return _describe_parts(path, sum(files.values()), pinned=PIN_FILE in files)
        problems = error.problems if isinstance(error, CheckpointError) else [str(error)]
        step, size = step_of(name), sum(files.values())
        return ListedCheckpoint(path=path, step=step, problems=problems, bytes=size)
    notes = []
    if step_of(name) < 0:
        proper = f"step-{manifest.step:08d}" + f".g{manifest.generation}" * bool(
            manifest.generation
        )
        notes.append(f"no run finds it under this name: rename it to {proper}, or resume its path")
    bad = BAD_FILE in files
    return ListedCheckpoint(
        path=path,
        step=manifest.step,
        generation=manifest.generation,
        tokens=manifest.tokens,
        bytes=manifest.total_bytes,
        ranks=manifest.run_ranks,
        mesh=manifest.mesh,
        shards=manifest.world_size,
        created=manifest.created,
        age_seconds=_age_seconds(manifest.created),
        pinned=PIN_FILE in files,
        verified=tier.read(f"{name}/{VERIFIED_FILE}").decode() if VERIFIED_FILE in files else "",
        bad=bad,
        problems=read_bad(tier, name) if bad else [],
        notes=notes,
    )


def _describe_parts(path: str, size: int, *, pinned: bool) -> ListedCheckpoint:
    """What a node's own disk holds of a step, by the words of the ranks that wrote it."""
    shards = list(records_in(Path(path)))
    if not shards:
        problems = ["its records are damaged"]
        return ListedCheckpoint(
            path=path, step=step_of(Path(path).name), bytes=size, problems=problems
        )
    draft = shards[0].record.order.draft
    return ListedCheckpoint(
        path=path,
        step=draft.step,
        generation=draft.generation,
        tokens=draft.tokens,
        bytes=size,
        ranks=draft.world_size,
        mesh=draft.mesh,
        shards=len(shards),
        created=draft.created,
        age_seconds=_age_seconds(draft.created),
        pinned=pinned,
        parts=len(shards),
    )


def _age_seconds(created: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(created)).total_seconds()
