"""Loading by all ranks together: from disk, and from the memory of keepers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from phalanx.checkpoint.describe import current_rank, world_size
from phalanx.checkpoint.folder import mark_bad
from phalanx.checkpoint.keepers import find_keepers, node_name
from phalanx.checkpoint.load import Stored
from phalanx.checkpoint.manifest import BadCheckpointError, CheckpointError, Manifest
from phalanx.checkpoint.ranks import Ranks
from phalanx.checkpoint.recover import Candidate, KeeperSource, candidates, offers, release
from phalanx.checkpoint.source import Source
from phalanx.checkpoint.tier import open_source

log = logging.getLogger(__name__)


class Loader:
    """Fills the tensors of all ranks; every method is called by every rank."""

    def __init__(self) -> None:
        self._ranks = Ranks()
        self._bad_ranks: set[int] = set()  # whose shards the last load found to be bad

    def load(
        self, path: Path | str, tensors: dict[str, torch.Tensor], *, weights_only: bool = False
    ) -> Manifest:
        """Fill ``tensors`` in place, whatever mesh they were saved from; every byte is proved.

        With ``weights_only`` just the tensors under ``model.`` are read. After an error the
        tensors may be partly filled.
        """
        if weights_only:
            tensors = {name: t for name, t in tensors.items() if name.startswith("model.")}
        with self._ranks.together(path):
            source = open_source(path)
        return self._load_from(source, tensors)

    def _load_from(self, source: Source, tensors: dict[str, torch.Tensor]) -> Manifest:
        with self._ranks.together(source.where):
            stored = Stored(source)
            stored.check(tensors)
        self._bad_ranks = set()
        try:
            with self._ranks.together(source.where), torch.no_grad():
                stored.fill(tensors)
                rng = b""
                if source.manifest.world_size == world_size():
                    rng = source.sidecar(current_rank()).rng
        except CheckpointError:
            self._bad_ranks = set().union(*self._ranks.gather(stored.bad_ranks))
            raise
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
    ) -> Manifest | None:
        """Load the newest step that keepers still hold whole; None if there is none.

        ``newer_than`` is the step of a checkpoint that would do as well; ``step`` asks for a
        certain one.
        """
        for candidate in self._candidates(home):
            if step not in (-1, candidate.step):
                continue
            chosen: Candidate | None = candidate
            while chosen is not None and chosen.step > newer_than:
                try:
                    with self._ranks.together(home):
                        source = KeeperSource(chosen)
                    return self._load_from(source, tensors)
                except BadCheckpointError as error:
                    log.error("%s\n  trying the next replica", error)
                    chosen = self._without_bad(chosen)
                except CheckpointError as error:
                    log.warning("%s\n  so memory is not used", error)
                    return None
        return None

    def release_memory(self, home: Path) -> None:
        """The snapshots of earlier keepers are no longer needed; collective."""
        self._ranks.gather(None)  # until all ranks have read
        for path in find_keepers(home):
            release(path)

    def _candidates(self, home: Path) -> list[Candidate]:
        nodes = self._ranks.gather(node_name())
        first = nodes.index(nodes[current_rank()]) == current_rank()
        own = [offer for path in find_keepers(home) for offer in offers(path)] if first else []
        return candidates([offer for found in self._ranks.gather(own) for offer in found])

    def _without_bad(self, chosen: Candidate) -> Candidate | None:
        bad = self._bad_ranks
        if not bad:
            return None
        rest: Candidate | None = chosen
        for rank in sorted(bad):
            rest = rest.without(rank) if rest is not None else None
        return rest


def stored_tensors(path: Path | str) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Full shape and type of every tensor in a checkpoint."""
    return Stored(open_source(path)).tensors()
