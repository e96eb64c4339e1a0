"""What a leading server does beside its work: metrics to disk; old events, tokens, garbage out."""

from __future__ import annotations

import asyncio
import gc
import logging
import sqlite3
import time
from pathlib import Path

from phalanx.control.server.security.audit import Audit
from phalanx.control.server.security.auth import Tokens
from phalanx.control.server.store.archive import archive_events
from phalanx.control.server.store.interface import EventStore, StoreError
from phalanx.observe.store.metric_store import MetricStore

logger = logging.getLogger("phalanx.server")

FLUSH_SECONDS = 2.0  # of metrics; a killed server loses at most so many
KEEP_SECONDS = 60.0
ARCHIVE_SECONDS = 600.0
PRUNE_SECONDS = 600.0
FULL_COLLECTION_SECONDS = 900.0
NEVER = 1 << 30  # collections of the middle generation before one of the oldest


async def archive_old(store: EventStore, state: Path, days: float) -> None:
    """Events that no restart needs leave the log when they are old; 0 days: never."""
    folder = state / "archive"
    while days:
        await asyncio.sleep(ARCHIVE_SECONDS)
        before_ns = time.time_ns() - int(days * 86_400e9)
        try:
            moved = await asyncio.to_thread(archive_events, store, folder, before_ns)
        except (StoreError, OSError) as error:
            logger.error("old events cannot be archived: %s", error)
            continue
        if moved:
            logger.info("%d old events moved to %s", moved, folder)
    await asyncio.Event().wait()


async def keep_audit(audit: Audit) -> None:
    """Refusals that were counted are written, and old files go, also where nobody asks anything."""
    while True:
        await asyncio.sleep(KEEP_SECONDS)
        audit.flush()
        audit.expire()


async def prune_tokens(tokens: Tokens) -> None:
    """Tokens that are over, and links that were used, do not pile up."""
    while True:
        try:
            await asyncio.to_thread(tokens.prune)
        except StoreError as error:
            logger.error("old tokens cannot be removed: %s", error)
        await asyncio.sleep(PRUNE_SECONDS)


async def keep_metrics(metrics: MetricStore, most_bytes: int) -> None:
    """Metrics go to disk every few seconds; a disk that takes none costs nothing else."""
    kept, problem = time.monotonic(), ""
    while True:
        await asyncio.sleep(FLUSH_SECONDS)
        try:
            await asyncio.to_thread(metrics.flush)
            if time.monotonic() - kept > KEEP_SECONDS:
                kept = time.monotonic()
                await asyncio.to_thread(metrics.keep, time.time_ns(), most_bytes)
            problem = ""
        except (sqlite3.Error, OSError) as error:
            if str(error) != problem:
                logger.error("metrics cannot be stored: %s", error)
            problem = str(error)


async def collect_garbage(every_seconds: float = FULL_COLLECTION_SECONDS) -> None:
    """Looks for circles among long-lived objects now and then, not in the middle of an order.

    With thousands of agents that takes a fifth of a second, and the collector of its own accord
    does so whenever a quarter more is there than the last time.
    """
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)
    try:
        while True:
            await asyncio.sleep(every_seconds)
            gc.unfreeze()
            gc.collect()
            gc.freeze()
    finally:
        gc.set_threshold(young, middle, old)
