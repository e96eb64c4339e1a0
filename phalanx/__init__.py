"""Phalanx trains very large models on GPU clusters and keeps every GPU busy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.control.worker.client import WorkerClient

__version__ = "0.1.0"


def worker() -> WorkerClient:
    """For programs of your own: reports steps to the agent and has snapshots kept."""
    from phalanx.control.worker.client import WorkerClient

    return WorkerClient()
