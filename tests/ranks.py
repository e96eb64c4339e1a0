"""Ranks for tests: forked from this process, which has imported torch already.

``OMP_NUM_THREADS=1`` in conftest keeps it single-threaded.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from phalanx.train.parity.ranks import RankError, run_group

__all__ = ["RankError", "die_together", "run_alone", "run_ranks"]


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_seconds: float = 270.0
) -> list[Any]:
    """Call ``function(*args)`` on every rank of a gloo group; results in order of ranks."""
    values = run_group(world_size, lambda: pickle.dumps(function(*args)), timeout_seconds)
    return [pickle.loads(value) for value in values]


def run_alone(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(*args)`` in a child without a group, to keep its traces out of this process.

    A process group, even a pretended one, leaves threads or state behind that later forks inherit.
    """

    def call() -> Any:
        dist.destroy_process_group()
        value = function(*args)
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        return value

    return run_ranks(1, call)[0]


def die_together() -> None:
    """Every rank kills itself once all are here; no group of theirs notices before."""
    store = dist.distributed_c10d._get_default_store()
    store.add("dying", 1)
    while store.add("dying", 0) < dist.get_world_size():
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)
