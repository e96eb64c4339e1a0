"""Which rank writes which part of which tensor, and who has what a reader wants.

A table says what the ranks of one group hold (a pipeline stage, mostly); it is the same on all
of them. A group adds where its meshes stand. From both, any rank computes any other's part.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

import msgspec

from phalanx.checkpoint.format.layout import Layout, TensorBlock, row_dim
from phalanx.data.corpus.checksum import crc32c

LEAST_PART_BYTES = 1 << 20  # copies share the writing of a block in parts of at least this

Run = tuple[int, int, int]  # first, count, step
Runs = tuple[Run, ...]

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2,
    "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor as the whole mesh holds it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: int  # index into the table's layouts

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]


class TensorTable(msgspec.Struct, frozen=True, array_like=True):
    """What every rank of a group holds."""

    entries: tuple[TensorEntry, ...]
    layouts: tuple[Layout, ...]


class RankGroup(msgspec.Struct, frozen=True):
    """Ranks with the same table, and the first rank of each of their meshes by layout."""

    table: str  # digest of the table
    ranks: Runs
    bases: tuple[Runs, ...]


class TensorPiece(NamedTuple):
    """The part of a tensor that one rank writes."""

    name: str
    dtype: str
    box: TensorBlock  # in the whole tensor
    local: TensorBlock  # in the rank's own block
    bytes: int


class PartHolder(NamedTuple):
    """A rank that wrote a part of what is wanted."""

    rank: int
    name: str
    written: TensorBlock  # all it wrote of this tensor
    wanted: TensorBlock  # the share of it that is wanted


class MeshPosition(NamedTuple):
    """Where a rank stands in the meshes of its table's layouts."""

    bases: tuple[int, ...]
    coordinates: tuple[tuple[int, ...], ...]


def encode_table(table: TensorTable) -> bytes:
    return msgspec.json.encode(table)


def digest_of(encoded: bytes) -> str:
    """Name of a table by its content."""
    return hashlib.blake2b(encoded, digest_size=16).hexdigest()


def form_groups(ranks: Iterable[tuple[str, tuple[int, ...]]]) -> tuple[RankGroup, ...]:
    """Groups out of every rank's (digest of its table, first rank of its meshes by layout)."""
    members: dict[str, list[int]] = {}
    bases: dict[str, list[dict[int, None]]] = {}
    for rank, (digest, own) in enumerate(ranks):
        members.setdefault(digest, []).append(rank)
        of_group = bases.setdefault(digest, [{} for _ in own])
        for seen, base in zip(of_group, own, strict=True):
            seen[base] = None
    return tuple(
        RankGroup(digest, to_runs(found), tuple(to_runs(sorted(seen)) for seen in bases[digest]))
        for digest, found in members.items()
    )


class Geometry:
    """One group's table, open to questions."""

    def __init__(self, table: TensorTable, group: RankGroup) -> None:
        self.table, self.group = table, group

    @cached_property
    def by_name(self) -> dict[str, TensorEntry]:
        return {entry.name: entry for entry in self.table.entries}

    @cached_property
    def _bases(self) -> list[list[int]]:
        return [from_runs(runs) for runs in self.group.bases]

    @cached_property
    def _ranks(self) -> list[list[int]]:
        return [from_runs(layout.ranks) for layout in self.table.layouts]

    def written_by(self, stand: MeshPosition) -> list[TensorPiece]:
        """The parts that the rank standing there writes, in the order of its file."""
        pieces = []
        for entry in self.table.entries:
            layout = self.table.layouts[entry.layout]
            coordinate = stand.coordinates[entry.layout]
            block = layout.block(entry.shape, coordinate)
            of_mesh = bisect_right(self._bases[entry.layout], stand.bases[entry.layout]) - 1
            copy = of_mesh * layout.copies + layout.copy_index(coordinate)
            box = self._part(entry, block, copy)
            if box is not None:
                size = box.elements * entry.item_bytes
                pieces.append(TensorPiece(entry.name, entry.dtype, box, box.within(block), size))
        # Wide types first: every element is aligned without gaps, which safetensors forbids.
        return sorted(pieces, key=lambda piece: -ITEM_BYTES[piece.dtype])

    def holding(self, name: str, wanted: TensorBlock) -> Iterator[PartHolder]:
        """Who wrote the box ``wanted`` of a tensor; the shares do not overlap."""
        entry = self.by_name[name]
        layout = self.table.layouts[entry.layout]
        for coordinate, block in layout.blocks_meeting(entry.shape, wanted):
            for copy, box in self._parts(entry, block):
                share = box.meets(wanted)
                if share is not None:
                    rank = self._rank(entry.layout, coordinate, copy)
                    yield PartHolder(rank, name, box, share)

    def _rank(self, layout: int, coordinate: tuple[int, ...], copy: int) -> int:
        geometry = self.table.layouts[layout]
        mesh, index = divmod(copy, geometry.copies)
        at = geometry.flat(geometry.with_copy(coordinate, index))
        return self._bases[layout][mesh] + self._ranks[layout][at]

    def _copies(self, entry: TensorEntry) -> int:
        return len(self._bases[entry.layout]) * self.table.layouts[entry.layout].copies

    def _split(self, entry: TensorEntry, block: TensorBlock) -> tuple[int, int, int]:
        """Into how many parts copies share a block's writing, its rows, and who takes the first."""
        copies = self._copies(entry)
        rows = block.sizes[row_dim(block.sizes)] if block.sizes else 1
        by_size = block.elements * entry.item_bytes // LEAST_PART_BYTES
        parts = min(copies, rows, max(1, by_size))
        first = crc32c(f"{entry.name}{block.offset}".encode()) % copies if copies > 1 else 0
        return parts, rows, first

    def _parts(self, entry: TensorEntry, block: TensorBlock) -> Iterator[tuple[int, TensorBlock]]:
        parts, rows, first = self._split(entry, block)
        for part in range(parts):
            box = block.rows(rows * part // parts, rows * (part + 1) // parts)
            yield (first + part) % self._copies(entry), box

    def _part(self, entry: TensorEntry, block: TensorBlock, copy: int) -> TensorBlock | None:
        if block.elements == 0:
            return None
        parts, rows, first = self._split(entry, block)
        piece = (copy - first) % self._copies(entry)
        if piece >= parts:
            return None
        return block.rows(rows * piece // parts, rows * (piece + 1) // parts)


def to_runs(numbers: Iterable[int]) -> Runs:
    """Numbers as arithmetic progressions, which the ranks of a mesh mostly are."""
    runs: list[Run] = []
    for number in numbers:
        if runs:
            first, count, step = runs[-1]
            if count == 1 and number > first:
                runs[-1] = (first, 2, number - first)
                continue
            if count > 1 and number == first + count * step:
                runs[-1] = (first, count + 1, step)
                continue
        runs.append((number, 1, 1))
    return tuple(runs)


def from_runs(runs: Runs) -> list[int]:
    """The numbers that ``to_runs`` was given."""
    return [first + i * step for first, count, step in runs for i in range(count)]
