"""Checkpoints: complete or absent, proved by checksums, loadable from any mesh into any mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phalanx.checkpoint.format.folder import latest, list_checkpoints
from phalanx.checkpoint.format.manifest import (
    BadCheckpointError,
    CheckpointError,
    Extra,
    LostPlaceError,
    Manifest,
    Shard,
    read_manifest,
)

if TYPE_CHECKING:
    from phalanx.checkpoint.checkpointer import Checkpointer
    from phalanx.checkpoint.read.group_load import stored_tensors

__all__ = [
    "BadCheckpointError",
    "CheckpointError",
    "Checkpointer",
    "Extra",
    "LostPlaceError",
    "Manifest",
    "Shard",
    "latest",
    "list_checkpoints",
    "read_manifest",
    "stored_tensors",
]


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is used: the keeper and listings do without."""
    if name == "Checkpointer":
        from phalanx.checkpoint.checkpointer import Checkpointer

        return Checkpointer
    if name == "stored_tensors":
        from phalanx.checkpoint.read.group_load import stored_tensors

        return stored_tensors
    raise AttributeError(name)
