"""Phalanx trains very large models on GPU clusters and keeps every GPU busy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.control.worker.client import WorkerClient

__version__ = "0.2.0"


def worker() -> WorkerClient:
    """For programs of your own: reports steps to the agent and has snapshots kept."""
    from phalanx.control.worker.client import WorkerClient

    return WorkerClient()


def transformers_callback() -> Any:
    """The same for the Trainer of transformers: one of its callbacks."""
    from phalanx.control.worker import callbacks

    return callbacks.transformers_callback()


def lightning_callback() -> Any:
    """The same for Lightning's Trainer: one of its callbacks."""
    from phalanx.control.worker import callbacks

    return callbacks.lightning_callback()
