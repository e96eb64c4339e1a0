"""A program of the user's: one process a rank, in the environment that torchrun would give it."""

from __future__ import annotations

import os
from datetime import timedelta

from phalanx.control.wire.zygote_messages import Spawn
from phalanx.control.worker.not_started import execute

MEET_SECONDS = 300.0


def run_program(order: Spawn) -> int:
    """Learn where the ranks of this program meet, then become it."""
    host, port, prefix = order.store
    meeting = meet(host, port, prefix, order.rank, order.own_port)
    os.environ |= {"MASTER_ADDR": meeting[0], "MASTER_PORT": meeting[1]}
    # An agent hosts the store, as torchrun's does: rank 0 is not to open one of its own.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    execute(order.argv)


def meet(host: str, port: int, prefix: str, rank: int, own_port: int) -> tuple[str, str]:
    """The address of this generation's own store, which the first rank's node has opened.

    Programs use a store as if they had it for themselves, so the agents' common one only serves
    to find it.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    timeout = timedelta(seconds=MEET_SECONDS)
    common = TCPStore(host, port, is_master=False, timeout=timeout)
    store = PrefixStore(prefix, common)
    if rank == 0:
        store.set("port", str(own_port))
    return host, store.get("port").decode()
