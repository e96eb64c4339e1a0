"""Token shards, the order of samples, readers, tokenising.

Which sample comes when is a function of (seed, sample number) alone. A ``Feed`` gives one
replica its share of every step; all it must remember between steps is a ``Cursor``.
"""

from __future__ import annotations

from phalanx.data.corpus.manifest import CorpusManifest, ShardFile, read_manifest
from phalanx.data.corpus.opening import open_stream, refuse_mixed_tokenizers
from phalanx.data.corpus.shards import ShardStream
from phalanx.data.corpus.source import SampleSource, Split, open_sources, refuse_unreadable
from phalanx.data.corpus.stream import Files, FileStream, TokenPosition, TokenStream
from phalanx.data.corpus.synthetic import SyntheticSource
from phalanx.data.corpus.verifying import verify
from phalanx.data.corpus.writer import ShardWriter
from phalanx.data.errors import DataError, DataExhausted
from phalanx.data.feed import WEIGHTLESS, Batch, Feed, StepBatches
from phalanx.data.order.cursor import Cursor
from phalanx.data.reader import SampleReader
from phalanx.data.staged import StagedFeed

__all__ = [
    "WEIGHTLESS",
    "Batch",
    "CorpusManifest",
    "Cursor",
    "DataError",
    "DataExhausted",
    "Feed",
    "FileStream",
    "Files",
    "SampleReader",
    "SampleSource",
    "ShardFile",
    "ShardStream",
    "ShardWriter",
    "Split",
    "StagedFeed",
    "StepBatches",
    "SyntheticSource",
    "TokenPosition",
    "TokenStream",
    "open_sources",
    "open_stream",
    "read_manifest",
    "refuse_mixed_tokenizers",
    "refuse_unreadable",
    "verify",
]
