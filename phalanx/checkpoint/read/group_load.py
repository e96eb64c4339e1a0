"""Loading by all ranks together: from disk, and from the memory of keepers."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import torch

from phalanx.checkpoint.format.describe import current_rank, world_size
from phalanx.checkpoint.format.folder import mark_bad
from phalanx.checkpoint.format.manifest import BadCheckpointError, CheckpointError, Manifest
from phalanx.checkpoint.format.source import CheckpointSource, rng_of
from phalanx.checkpoint.format.tier import open_source
from phalanx.checkpoint.keeper.start import find_keepers, node_name, start_keeper
from phalanx.checkpoint.ranks import Ranks
from phalanx.checkpoint.read.load import StoredTensors
from phalanx.checkpoint.read.memory import (
    KeeperSource,
    RestoreCandidate,
    SnapshotOffer,
    candidates,
    condemn_held,
    inventory,
    offers,
    offers_on_disk,
    release,
)
from phalanx.checkpoint.write.node_disk import condemn

READING_SECONDS = 600.0  # that a keeper lives which only reads a disk for other nodes

log = logging.getLogger(__name__)


class Loader:
    """Fills the tensors of all ranks; every method is called by every rank."""

    def __init__(self) -> None:
        self._ranks = Ranks()
        self._opened = False  # the last load read more than what describes the checkpoint
        self.broke_off = False  # the last load did, with tensors partly filled
        self.loaded_from = ""  # where the last load found what it loaded
        self.passed_over: list[str] = []  # what would have come first, and what is wrong with it

    def load(
        self, path: Path | str, tensors: dict[str, torch.Tensor], *, weights_only: bool = False
    ) -> Manifest:
        """Fill ``tensors`` in place, whatever mesh they were saved from; every byte is proved.

        With ``weights_only`` just the tensors under ``model.`` are read. After an error the
        tensors may be partly filled.
        """
        if weights_only:
            tensors = {name: t for name, t in tensors.items() if name.startswith("model.")}
        return self._load_from(path, lambda: open_source(path), tensors)

    def _load_from(
        self,
        where: Path | str,
        opened: Callable[[], CheckpointSource],
        tensors: dict[str, torch.Tensor],
    ) -> Manifest:
        self._opened = False
        with self._ranks.together(where):
            source = opened()
            stored = StoredTensors(source)
            tensors = stored.present(tensors)
            stored.check(tensors)
        self._opened = self.broke_off = True
        with self._ranks.together(source.where), torch.no_grad():
            stored.fill(tensors)
            rng = b""
            if source.manifest.run_ranks == world_size():
                rng = rng_of(source, current_rank())
        self.broke_off, self.loaded_from = False, str(source.where)
        return msgspec.structs.replace(source.manifest, rng=rng)

    def load_newest(
        self,
        paths: Sequence[Path | str],
        tensors: dict[str, torch.Tensor],
        *,
        weights_only: bool = False,
    ) -> Manifest:
        """Load the first of ``paths`` that is whole: newest first, copies behind their originals.

        Those that turn out bad are marked, so that nobody tries them again.
        """
        for number, path in enumerate(paths):
            try:
                return self.load(path, tensors, weights_only=weights_only)
            except BadCheckpointError as error:
                if current_rank() == 0:
                    mark_bad(path, error.problems)
                self._pass_over(path, error)
                if number == len(paths) - 1:
                    raise
                log.error("%s\n  falling back to %s", error, paths[number + 1])
        raise CheckpointError("(none)", "there is no checkpoint to load")

    def load_memory(
        self,
        home: Path,
        tensors: dict[str, torch.Tensor],
        *,
        newer_than: int = -1,
        step: int = -1,
        local: Path | None = None,
        local_run: str = "",
    ) -> Manifest | None:
        """Load the newest step that keepers still hold whole; None if there is none.

        Then ``broke_off`` tells whether the tensors are as they were.

        ``newer_than`` is the step of a checkpoint that would do as well. What lies under ``local``
        on the nodes' own disks counts as held, unless its run is older than ``local_run``. ``step``
        asks for a certain one, on disks of that very run.
        """
        for candidate in self._candidates(home, local, local_run, only_run=step != -1):
            if step not in (-1, candidate.step):
                continue
            chosen: RestoreCandidate | None = candidate
            while chosen is not None and chosen.step > newer_than:
                try:
                    return self._load_from(home, partial(KeeperSource, chosen), tensors)
                except BadCheckpointError as error:
                    log.error("%s\n  trying the next replica", error)
                    self._pass_over(f"memory of keepers, step {chosen.step}", error)
                    if self._opened:  # else its holder is gone, and nothing was seen of the bytes
                        self._condemn(chosen, error.ranks, local)
                    chosen = _without_first_holder(chosen, error.ranks)
                except CheckpointError as error:
                    log.warning("%s\n  so memory is not used", error)
                    self._pass_over("memory of keepers", error)
                    return None
        return None

    def _pass_over(self, where: Path | str, error: CheckpointError) -> None:
        self.passed_over.append(f"{where}: {'; '.join(error.problems)}")

    def release_memory(self, home: Path) -> None:
        """The snapshots of earlier keepers are no longer needed; collective."""
        self._ranks.gather(None)  # until all ranks have read
        for path in find_keepers(home):
            release(path)

    def _candidates(
        self, home: Path, local: Path | None, local_run: str, only_run: bool
    ) -> list[RestoreCandidate]:
        nodes = self._ranks.gather(node_name())
        own: list[SnapshotOffer] = []
        notes: list[str] = []
        if nodes.index(nodes[current_rank()]) == current_rank():
            own, keepers, notes = _offered_here(home)
            if local is not None and local.is_dir():
                keeper = keepers[0] if keepers else ""
                if not keeper and len(set(nodes)) > 1:  # somebody has to read for other nodes
                    keeper, _ = start_keeper(home, READING_SECONDS, Path(os.devnull))
                own += offers_on_disk(local, keeper)
        told = self._ranks.gather((own, notes))
        offers = [offer for each, _ in told for offer in each]
        self.passed_over += [note for _, each in told for note in each]
        runs = [offer.run for offer in offers if offer.run]
        run = local_run if only_run else max([local_run, *runs], key=_age)
        return candidates([offer for offer in offers if offer.run in ("", run)])

    def _condemn(self, chosen: RestoreCandidate, bad: tuple[int, ...], local: Path | None) -> None:
        """What is wrong in a keeper's memory or on this node's disk is not tried again."""
        for rank in bad:
            keeper = chosen.holders[rank][0]
            if not keeper.folder and current_rank() == 0:
                condemn_held(keeper, rank, chosen.session, chosen.step)
            elif keeper.folder and keeper.node == node_name() and local is not None:
                with suppress(OSError):  # another rank of this node was first
                    condemn(Path(keeper.folder).parents[1], rank, chosen.session, chosen.step)


def _without_first_holder(
    chosen: RestoreCandidate, ranks: tuple[int, ...]
) -> RestoreCandidate | None:
    """The same step from the next holders of these ranks' snapshots; None if there are none."""
    rest = chosen if ranks else None
    for rank in ranks:
        rest = rest.without(rank) if rest is not None else None
    return rest


def _offered_here(home: Path) -> tuple[list[SnapshotOffer], list[str], list[str]]:
    """What keepers of this node offer, who they are, and what of them is left alone and why.

    A run of the same name that is at work needs its own; an agent's keeper is this job's.
    """
    own: list[SnapshotOffer] = []
    keepers, notes = [], []
    for path in find_keepers(home):
        keeper = inventory(path)
        if keeper is None:
            continue
        if keeper.live and not os.environ.get("PHALANX_KEEPER"):
            steps = max((header.step for header in keeper.headers), default=-1)
            newest = f", step {steps}" if steps >= 0 else ""
            notes.append(f"memory of keepers{newest}: it is of another run that is at work")
            continue
        bad = sorted({header.step for header in keeper.condemned})
        notes += [f"memory of keepers, step {step}: found bad before" for step in bad]
        own += offers(path, keeper)
        keepers.append(path)
    return own, keepers, notes


def _age(run: str) -> list[str | int]:
    """Of runs by their names; numbers count as such: the tenth comes after the ninth."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", run)]


def stored_tensors(path: Path | str) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Full shape and type of every tensor in a checkpoint."""
    return StoredTensors(open_source(path)).tensors()
