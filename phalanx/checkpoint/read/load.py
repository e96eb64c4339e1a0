"""Loading: each rank reads and proves the chunks that cover what it wants, several at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import local as ThreadLocal
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.checkpoint.format.describe import DTYPES, local_part, place, world_size
from phalanx.checkpoint.format.direct import CHUNK_BYTES, aligned_buffer, chunk_sums
from phalanx.checkpoint.format.geometry import ITEM_BYTES, Geometry, PartHolder
from phalanx.checkpoint.format.layout import TensorBlock
from phalanx.checkpoint.format.manifest import BadCheckpointError, CheckpointError, shard_name
from phalanx.checkpoint.format.shard import Sidecar, StoredTensor, parse_header
from phalanx.checkpoint.format.source import CheckpointSource, ShardReader

READ_BYTES = 4 << 20  # read at a time by one thread: proved and handed out while in the caches
READERS = 8  # threads: with half of them the disk waits while the others prove and copy
# State that a run may begin to keep after its start: what a checkpoint lacks of it starts anew.
OPTIONAL = ("ema.", "balance.")
SHARED_READS = 1.5  # times that the ranks together may want a byte, for reads past the page cache

Problems = list[tuple[int, str]]  # rank of the shard, what is wrong


class Span(NamedTuple):
    """A contiguous stretch of a file, and what of it goes where."""

    start: int  # byte in the file
    bytes: int
    dtype: str
    sizes: tuple[int, ...]  # of the stretch as a box
    take: tuple[slice, ...]  # of that box
    name: str
    target: Tensor  # receives it; a view of the tensor to fill


class StoredTensors:
    """The tensors of a checkpoint, wherever it lies."""

    def __init__(self, source: CheckpointSource) -> None:
        self.source, self.path = source, source.where
        self._holders: dict[str, list[Geometry]] = {}
        for group in source.manifest.groups:
            geometry = Geometry(source.table(group), group)
            for name in geometry.by_name:  # of a tensor held by several groups one copy is read
                self._holders.setdefault(name, []).append(geometry)

    def tensors(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Full shape and type of every tensor."""
        entries = (holders[0].by_name[name] for name, holders in self._holders.items())
        return {entry.name: (torch.Size(entry.shape), DTYPES[entry.dtype]) for entry in entries}

    def copies(self) -> dict[str, int]:
        """Tensors that several groups (pipeline stages) wrote whole, and how many did."""
        found = {name: len(holders) for name, holders in self._holders.items()}
        return {name: count for name, count in found.items() if count > 1}

    def present(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Without optional ones that the checkpoint lacks."""
        return {
            name: tensor
            for name, tensor in tensors.items()
            if name in self._holders or not name.startswith(OPTIONAL)
        }

    def check(self, tensors: dict[str, Tensor]) -> None:
        """Refuse tensors that are not in the checkpoint or have another shape, naming them all."""
        stored, problems, missing = self.tensors(), [], []
        for name, tensor in tensors.items():
            if name not in stored:
                missing.append(name)
                problems.append(f"{name} {tuple(tensor.shape)} is not in the checkpoint")
            elif stored[name][0] != tensor.shape:
                shapes = f"{tuple(stored[name][0])}, the model has {tuple(tensor.shape)}"
                problems.append(f"{name} has the shape {shapes}")
        if problems:
            fix = "load into the model that was saved, or start from another checkpoint"
            if len(missing) == len(problems) and not any(n.startswith("model.") for n in missing):
                fix = "set checkpoint.weights_only = true to take the weights alone"
            raise CheckpointError(self.path, problems, fix)

    def fill(self, tensors: dict[str, Tensor]) -> None:
        """Copy this rank's blocks into ``tensors``; every byte that is used has been proved."""
        by_rank: dict[int, list[tuple[PartHolder, Tensor]]] = {}
        wanted_bytes = 0
        for name, tensor in tensors.items():
            layout, _, coordinate = place(tensor)
            block = layout.block(tuple(tensor.shape), coordinate)
            target = local_part(tensor)
            wanted_bytes += target.numel() * target.element_size()
            self._share(name, block, target, by_rank)
        # What several ranks of a node want comes from the page cache for all but the first.
        total = self.source.manifest.total_bytes
        direct = wanted_bytes * world_size() <= SHARED_READS * total
        self._fill(by_rank, direct)

    def fill_rows(self, name: str, first: int, target: Tensor, copy: int = 0) -> None:
        """Copy rows of a whole tensor, from ``first`` on, into ``target``."""
        by_rank: dict[int, list[tuple[PartHolder, Tensor]]] = {}
        offset = (first, *(0,) * (target.dim() - 1)) if target.dim() else ()
        self._share(name, TensorBlock(offset, tuple(target.shape)), target, by_rank, copy)
        self._fill(by_rank, direct=False)

    def _share(
        self,
        name: str,
        block: TensorBlock,
        target: Tensor,
        by_rank: dict[int, list[tuple[PartHolder, Tensor]]],
        copy: int = 0,
    ) -> None:
        """Who has which part of a block, and where it goes."""
        if block.elements == 0:
            return
        for share in self._holders[name][copy].holding(name, block):
            part = target[share.wanted.within(block).slices]
            by_rank.setdefault(share.rank, []).append((share, part))

    def _fill(self, by_rank: dict[int, list[tuple[PartHolder, Tensor]]], direct: bool) -> None:
        problems = Problems()
        with ThreadPoolExecutor(READERS) as pool:
            opened = pool.map(
                lambda item: self._open(item[0], item[1], direct, problems), by_rank.items()
            )
            files = [file for file in opened if file is not None]
            windows = [(file, window) for file in files for window in file.windows()]
            buffers = ThreadLocal()
            try:
                list(pool.map(lambda item: item[0].load(item[1], buffers, problems), windows))
            finally:
                for file in files:
                    file.reader.close()
        if problems:
            bad = tuple({rank for rank, _ in problems})
            raise BadCheckpointError(self.path, sorted({each for _, each in problems}), ranks=bad)

    def _open(
        self,
        rank: int,
        shares: list[tuple[PartHolder, Tensor]],
        direct: bool,
        problems: Problems,
    ) -> _File | None:
        name = shard_name(rank, self.source.manifest.session)
        tensors = _named(share.name for share, _ in shares)
        try:
            sidecar = self.source.sidecar(rank)
            reader = self.source.open_shard(rank, direct)
        except BadCheckpointError as error:
            problems += [(rank, f"{problem} (with {tensors})") for problem in error.problems]
            return None
        except OSError as error:
            reason = error.strerror or error
            problems.append((rank, f"{name} cannot be read: {reason} (with {tensors})"))
            return None
        file = _File(name, rank, reader, sidecar)
        if reader.bytes != sidecar.shard_bytes:
            sizes = f"has {reader.bytes} bytes instead of {sidecar.shard_bytes}"
            problems.append((rank, f"{name} {sizes} (truncated or replaced) (with {tensors})"))
        elif not file.read_spans(shares):
            where = f"its header or what follows up to byte {file.header_end}"
            problems.append((rank, f"{name} is corrupt: {where} (with {tensors})"))
        return file


class _File:
    """One shard file, its proved header and what is wanted of it."""

    def __init__(self, name: str, rank: int, reader: ShardReader, sidecar: Sidecar) -> None:
        self.name, self.rank, self.reader, self.sidecar = name, rank, reader, sidecar
        self.spans: list[Span] = []
        self._sums = sidecar.chunk_sums

    @property
    def header_end(self) -> int:
        """End of the last chunk with a part of the header: no less can be proved."""
        chunks = -(-self.sidecar.header_bytes // CHUNK_BYTES)
        return min(chunks * CHUNK_BYTES, self.sidecar.shard_bytes)

    def read_spans(self, shares: list[tuple[PartHolder, Tensor]]) -> bool:
        """Find what is wanted in the file; False where its header cannot be trusted."""
        size, covered = self.sidecar.header_bytes, self.header_end
        chunks = -(-size // CHUNK_BYTES)
        buffer = aligned_buffer(covered)
        try:
            count = self.reader.read(buffer[:covered], 0)
        except OSError:
            return False
        if chunk_sums(buffer[:count]) != self._sums[:chunks].tolist():
            return False
        stored = parse_header(bytes(buffer[:size]))
        for share, target in shares:
            tensor = stored[share.name]
            box = share.wanted.within(share.written)
            self.spans += _spans(share.name, tensor, box, target)
        self.spans.sort(key=lambda span: span.start)
        return True

    def windows(self) -> Iterator[list[Span]]:
        """Neighbouring spans together, so that no chunk is read for each of its tensors."""
        window: list[Span] = []
        for span in self.spans:
            if window:
                left = READ_BYTES - window[0].start % READ_BYTES
                reach = span.start + span.bytes - window[0].start
                gap = span.start - (window[-1].start + window[-1].bytes)
                if reach > left or gap > CHUNK_BYTES:
                    yield window
                    window = []
            window.append(span)
        if window:
            yield window

    def load(self, window: list[Span], buffers: ThreadLocal, problems: Problems) -> None:
        """Read the chunks around a window, prove them, and hand out what they hold."""
        first = window[0].start // CHUNK_BYTES
        end = max(span.start + span.bytes for span in window)
        last = -(-end // CHUNK_BYTES)
        start = first * CHUNK_BYTES
        size = min(last * CHUNK_BYTES, self.sidecar.shard_bytes) - start
        if not hasattr(buffers, "buffer") or len(buffers.buffer) < size:
            buffers.buffer = aligned_buffer(max(size, READ_BYTES + 2 * CHUNK_BYTES))
        buffer: memoryview = buffers.buffer[:size]
        try:
            count = self.reader.read(buffer, start)
        except OSError as error:
            names, reason = _named(span.name for span in window), error.strerror or error
            problems.append((self.rank, f"{self.name} cannot be read: {reason} (with {names})"))
            return
        if count < size:
            names = _named(span.name for span in window)
            problems.append((self.rank, f"{self.name} ends early (with {names})"))
            return
        good = self._sums[first:last].tolist()
        wrong = [first + i for i, s in enumerate(chunk_sums(buffer)) if s != good[i]]
        if wrong:
            problems += [(self.rank, self._corrupt(chunk, window)) for chunk in wrong]
            return
        for span in window:
            _hand_out(span, buffer, span.start - start)

    def _corrupt(self, chunk: int, window: list[Span]) -> str:
        low, high = chunk * CHUNK_BYTES, (chunk + 1) * CHUNK_BYTES
        hit = (s.name for s in window if s.start < high and s.start + s.bytes > low)
        return f"{self.name} is corrupt in bytes {low} to {high}: {_named(hit)}"


def _spans(name: str, tensor: StoredTensor, box: TensorBlock, target: Tensor) -> Iterator[Span]:
    """A box of a stored part as stretches of its file, each of at most READ_BYTES or a row.

    Where rows are longer than a chunk and only some columns are wanted, row by row.
    """
    sizes, item = tensor.sizes, ITEM_BYTES[tensor.dtype]
    if box.sizes[1:] == sizes[1:] and target.is_contiguous():
        first = box.offset[0] * math.prod(sizes[1:]) if sizes else 0
        yield from _flat_spans(name, tensor, tensor.start + first * item, target.view(-1))
        return

    def walk(dim: int, first: int, taken: tuple[slice, ...]) -> Iterator[Span]:
        if dim == len(sizes):
            fixed = (1,) * dim
            yield Span(
                tensor.start + first * item, item, tensor.dtype, fixed, (), name, target[taken]
            )
            return
        inner = math.prod(sizes[dim + 1 :])
        row_bytes = inner * item
        low, count = box.offset[dim], box.sizes[dim]
        whole = box.sizes[dim + 1 :] == sizes[dim + 1 :]
        if row_bytes > CHUNK_BYTES and not (whole and row_bytes <= READ_BYTES):
            for i in range(count):
                yield from walk(dim + 1, first + (low + i) * inner, (*taken, slice(i, i + 1)))
            return
        rest = box.slices[dim + 1 :]
        step = max(1, READ_BYTES // row_bytes)
        for i in range(0, count, step):
            rows = min(step, count - i)
            shape = (*(1,) * dim, rows, *sizes[dim + 1 :])
            start = tensor.start + (first + (low + i) * inner) * item
            take = (*(slice(None),) * (dim + 1), *rest)
            into = target[(*taken, slice(i, i + rows))]
            yield Span(start, rows * row_bytes, tensor.dtype, shape, take, name, into)

    yield from walk(0, 0, ())


def _flat_spans(name: str, tensor: StoredTensor, start: int, target: Tensor) -> Iterator[Span]:
    """A contiguous stretch in pieces that end where reads do: no chunk is read for two of them."""
    item, done = ITEM_BYTES[tensor.dtype], 0
    while done < len(target):
        at = start + done * item
        # Types lie in the order of their widths, so an element never crosses such a border.
        count = min(len(target) - done, (READ_BYTES - at % READ_BYTES) // item)
        into = target[done : done + count]
        yield Span(at, count * item, tensor.dtype, (count,), (), name, into)
        done += count


def _hand_out(span: Span, buffer: memoryview, offset: int) -> None:
    dtype = DTYPES[span.dtype]
    flat = torch.frombuffer(buffer, dtype=dtype, count=math.prod(span.sizes), offset=offset)
    span.target.copy_(flat.view(span.sizes)[span.take])


def _named(names: Iterator[str]) -> str:
    """At most three names, in words."""
    found = list(dict.fromkeys(names))
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return ", ".join(found[:3]) + more
