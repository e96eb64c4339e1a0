"""How other loaders read the same tokens: shuffled samples in batches of int64 tensors.

Each function takes the corpus as one array, the sample length, the batch size and a folder for
files of its own, and returns an endless iterator of batches. A missing package raises ImportError.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Tokens = NDArray[np.uint16]


def memmap(tokens: Tokens, sequence: int, batch: int, folder: Path) -> Iterator[Tensor]:
    """Bare NumPy: slices of a mapped file, gathered in the order of a stored permutation."""
    samples = (len(tokens) - 1) // sequence
    for epoch in range(10**9):
        order = np.random.default_rng(epoch).permutation(samples)
        for first in range(0, samples - batch, batch):
            rows = [tokens[at * sequence : (at + 1) * sequence + 1] for at in order[first:][:batch]]
            yield torch.from_numpy(np.stack(rows).astype(np.int64))


class Samples:
    """The corpus by sample: what loaders of map-style data are given."""

    def __init__(self, tokens: Tokens, sequence: int) -> None:
        self._tokens, self._sequence = tokens, sequence

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._sequence

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        first = int(index) * self._sequence
        return self._tokens[first : first + self._sequence + 1].astype(np.int64)


def grain_elastic(tokens: Tokens, sequence: int, batch: int, folder: Path) -> Iterator[Tensor]:
    """Grain's elastic iterator: one global cursor, shuffled by index."""
    import grain
    from grain.experimental import ElasticIterator

    source = grain.MapDataset.source(Samples(tokens, sequence)).shuffle(seed=0).repeat()
    shard = grain.sharding.NoSharding() if hasattr(grain, "sharding") else grain.NoSharding()
    for rows in ElasticIterator(source, batch, shard):
        yield torch.from_numpy(rows)


def stateful_loader(tokens: Tokens, sequence: int, batch: int, folder: Path) -> Iterator[Tensor]:
    """torchdata's StatefulDataLoader without workers."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    def join(rows: list[NDArray[np.int64]]) -> Tensor:
        return torch.from_numpy(np.stack(rows))

    samples: Any = Samples(tokens, sequence)
    loader = StatefulDataLoader(samples, batch, shuffle=True, num_workers=0, collate_fn=join)
    for again in repeat(loader):
        yield from again


def litdata(tokens: Tokens, sequence: int, batch: int, folder: Path) -> Iterator[Tensor]:
    """litdata's token loader without workers, over its own chunks."""
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
    from litdata.streaming.cache import Cache

    if not (folder / "index.json").exists():
        loader = TokensLoader(block_size=sequence + 1)
        cache = Cache(str(folder), chunk_bytes="64MB", item_loader=loader)
        piece = 1 << 20
        for number, first in enumerate(range(0, len(tokens), piece)):
            cache[number] = torch.from_numpy(tokens[first : first + piece].astype(np.int32))
        cache.done()
        cache.merge()

    class AsInt64(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Tensor:
            row: Tensor = super().__getitem__(index)
            return row.long()

    loader = TokensLoader(block_size=sequence + 1)
    data = AsInt64(str(folder), item_loader=loader, shuffle=True, drop_last=True)
    for again in repeat(StreamingDataLoader(data, batch_size=batch, num_workers=0)):
        yield from again


def mosaic(tokens: Tokens, sequence: int, batch: int, folder: Path) -> Iterator[Tensor]:
    """MosaicML streaming without workers, over its own shards."""
    from streaming import MDSWriter, StreamingDataset
    from torch.utils.data import DataLoader

    if not (folder / "index.json").exists():
        columns = {"tokens": f"ndarray:uint16:{sequence}"}
        with MDSWriter(out=str(folder), columns=columns, size_limit=1 << 26) as writer:
            for first in range(0, len(tokens) - sequence, sequence):
                writer.write({"tokens": tokens[first : first + sequence]})

    class AsInt64(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> NDArray[np.int64]:
            row: NDArray[np.uint16] = super().__getitem__(index)["tokens"]
            return row.astype(np.int64)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = AsInt64(local=str(folder), shuffle=True, batch_size=batch)
    loader: DataLoader[Any] = DataLoader(data, batch_size=batch, num_workers=0)
    for again in repeat(loader):
        yield from again


PEERS = {
    "memmap": memmap,
    "grain elastic": grain_elastic,
    "StatefulDataLoader": stateful_loader,
    "litdata": litdata,
    "MosaicML streaming": mosaic,
}
