"""A large fleet's past without its agents: the log that a busy hour would have left.

The cluster core handles every event of it; a server that is started on the folder goes on from
there. Heartbeats are set so far apart that nobody misses the agents that were never there.
"""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.cluster_load import Load, fleet_of
from phalanx import __version__
from phalanx.cluster.core import Core
from phalanx.control.server.history.fleet_history import FleetHistory
from phalanx.control.server.policy_file import read_policy
from phalanx.control.server.shell_memory import ShellMemory
from phalanx.control.server.store.interface import StoredSnapshot, command_row, event_row
from phalanx.control.server.store.sqlite import SqliteStore

POLICY = """
[timeouts]
heartbeat_ns = 3_600_000_000_000
reconnect_ns = 3_600_000_000_000
[spares]
nodes = 60
[queue]
delay_ns = 1_000_000_000
"""
FRAME_NS = 10 * 10**9
EVENT_NS = 7_000_000  # one comes about so often, so that the log ends about now


def play(state: Path, nodes: int, events: int, seed: int = 0) -> Core:
    """Fills a server's state folder; returns the core as it was at the end."""
    state.mkdir(parents=True, exist_ok=True)
    (state / "policy.toml").write_text(POLICY)
    began_ns = time.time_ns() - events * EVENT_NS
    core = Core(fleet_of(nodes), read_policy(state / "policy.toml"), now_ns=began_ns)
    load, memory = Load(core, seed), ShellMemory()
    _start_at(load, began_ns)
    history = FleetHistory(state / "history.sqlite")
    rows, given, framed = [], [], 0
    for event in load.events(events):
        commands = core.handle(event)
        load.sent(commands)
        memory.note(event, commands)
        rows.append(event_row(event))
        if commands:
            given.append(command_row(event.sequence, commands))
        if event.time_ns - framed >= FRAME_NS:
            framed = event.time_ns
            history.keep(core)
    history.keep(core)
    history.close()
    store = SqliteStore(state / "log.sqlite")
    store.lead("http://127.0.0.1:0", __version__)
    store.append(rows, given)
    store.save_snapshot(
        StoredSnapshot(
            sequence=core.sequence,
            version=__version__,
            core=core.snapshot(),
            answers=memory.dump(),
        )
    )
    store.close()
    return core


def _start_at(load: Load, now_ns: int) -> None:
    load.now_ns = now_ns
    load.ahead = [(now_ns + after, order, body) for after, order, body in load.ahead]
