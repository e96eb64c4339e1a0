"""A simulated world's log, written as a server's: the fleet as it began, then every event."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from phalanx import __version__
from phalanx.cluster.core import Core
from phalanx.cluster.protocol.commands import Command
from phalanx.cluster.protocol.events import Event
from phalanx.control.recording import MARK
from phalanx.control.server.shell_memory import ShellMemory
from phalanx.control.server.store.interface import (
    CommandRow,
    EventStore,
    Row,
    StoredSnapshot,
    command_row,
    event_row,
    open_store,
)
from phalanx.simulate.draws import SeedDraws
from phalanx.simulate.scenario.scenario import Scenario
from phalanx.simulate.scenario.workload import submissions
from phalanx.simulate.world.world import World

BATCH_EVENTS = 2_000


class RecordingMark(Struct, frozen=True, kw_only=True):
    """What a recording says of itself."""

    about: str
    seed: int
    end_ns: int  # of the time that it tells of: its clock stands there
    version: str = __version__


class RecordingWriter:
    """Hears every event of a core from its beginning, and stores it."""

    def __init__(self, folder: Path, core: Core) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        self._store: EventStore = open_store("", folder)
        self._store.lead("", __version__)
        first = StoredSnapshot(
            sequence=0, version=__version__, core=core.snapshot(), answers=ShellMemory().dump()
        )
        self._store.save_snapshot(first)
        self._rows: list[Row] = []
        self._commands: list[CommandRow] = []

    def heard(self, event: Event, commands: Sequence[Command]) -> None:
        """An event was handled."""
        self._rows.append(event_row(event))
        if commands:
            self._commands.append(command_row(event.sequence, commands))
        if len(self._rows) >= BATCH_EVENTS:
            self._flush()

    def close(self, about: str, seed: int, end_ns: int) -> None:
        """Everything has happened. Without the mark a folder is no recording."""
        self._flush()
        self._store.close()
        mark = RecordingMark(about=about, seed=seed, end_ns=end_ns)
        (self._folder / MARK).write_bytes(msgspec.json.encode(mark) + b"\n")

    def _flush(self) -> None:
        self._store.append(self._rows, self._commands)
        self._rows, self._commands = [], []


def record(scenario: Scenario, seed: int, folder: Path) -> World:
    """Play one seed of a scenario into a new state folder; the world that it left behind."""
    world = World(scenario, seed)
    writer = RecordingWriter(folder, world.core)
    world.listeners.append(writer.heard)
    world.run(submissions(scenario, SeedDraws(seed)).jobs)
    writer.close(scenario.about or scenario.name, seed, world.end_ns)
    return world
