"""Checkpoints: complete or absent, proved by checksums, loadable from any mesh into any mesh."""

from phalanx.checkpoint.checkpointer import (
    Checkpointer,
    latest,
    list_checkpoints,
    stored_tensors,
)
from phalanx.checkpoint.manifest import CheckpointError, Extra, Manifest, Shard, read_manifest

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "Extra",
    "Manifest",
    "Shard",
    "latest",
    "list_checkpoints",
    "read_manifest",
    "stored_tensors",
]
