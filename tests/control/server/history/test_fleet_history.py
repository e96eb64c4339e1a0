"""The fleet's past: every moment can be had again, and losing it faults nothing."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cluster_load import Load, fleet_of, policy_of
from phalanx.cluster.core import Core
from phalanx.control.server.history import fleet_history
from phalanx.control.server.history.fleet_history import FleetFrame, FleetHistory, frame_of


def played(path: Path, events: int = 4000) -> tuple[FleetHistory, list[FleetFrame]]:
    """A history of a small busy fleet, and what it should say of each moment."""
    core = Core(fleet_of(64), policy_of())
    load, history = Load(core, 1), FleetHistory(path)
    kept: list[FleetFrame] = []
    for event in load.events(events):
        load.sent(core.handle(event))
        if event.time_ns and (not kept or event.time_ns - kept[-1].time_ns > 5 * 10**9):
            history.keep(core)
            kept.append(frame_of(core, event.time_ns))
    return history, kept


def same(one: FleetFrame | None, other: FleetFrame) -> bool:
    assert one is not None
    columns = ("state", "job", "free_gpus")
    equal = all(np.array_equal(getattr(one, c), getattr(other, c)) for c in columns)
    return equal and [tuple(each) for each in one.jobs] == other.jobs


def test_every_moment_is_given_back_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_history, "WHOLE_EVERY", 16)
    history, kept = played(tmp_path / "history.sqlite")
    assert len(kept) > 40 and len({frame.state.tobytes() for frame in kept}) > 5
    for index in random.Random(0).sample(range(len(kept) - 1), 25):
        between = (kept[index].time_ns + kept[index + 1].time_ns) // 2
        assert same(history.at(kept[index].time_ns), kept[index])
        assert same(history.at(between), kept[index])
    first, last = history.bounds()
    assert (first, last <= kept[-1].time_ns) == (kept[0].time_ns, True)
    assert same(history.at(1), kept[0])  # before the first: the first


def test_a_restarted_server_goes_on_with_the_past(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"
    history, kept = played(path, 1500)
    history.close()
    again = FleetHistory(path)
    assert same(again.at(kept[-1].time_ns), kept[-1])


def test_a_damaged_file_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"
    path.write_bytes(b"this is no database" * 1000)
    history, kept = played(path, 1500)
    assert same(history.at(kept[-1].time_ns), kept[-1])


def test_old_frames_go_and_what_is_left_begins_with_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_history, "WHOLE_EVERY", 8)
    monkeypatch.setattr(fleet_history, "MOST_FRAMES", 20)
    history, kept = played(tmp_path / "history.sqlite")
    with sqlite3.connect(tmp_path / "history.sqlite") as database:
        whole = database.execute("SELECT whole FROM frame ORDER BY time_ns").fetchall()
    assert len(whole) < 20 + 2 * 8 and whole[0] == (1,)
    assert same(history.at(kept[-1].time_ns), kept[-1])
    assert history.bounds()[0] > kept[0].time_ns


def test_changes_while_a_frame_is_written_are_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_history, "LEAST_SECONDS", 0.01)
    core = Core(fleet_of(64), policy_of())
    load, history = Load(core, 2), FleetHistory(tmp_path / "history.sqlite")

    async def scenario() -> None:
        changed = asyncio.Event()
        following = asyncio.create_task(history.follow(core, changed))
        for event in load.events(1500):
            load.sent(core.handle(event))
            changed.set()
            if event.sequence % 100 == 0:
                await asyncio.sleep(0.005)
        async with asyncio.timeout(60):
            while not same(history.at(core.view.now_ns), frame_of(core, core.view.now_ns)):
                await asyncio.sleep(0.05)
        following.cancel()

    asyncio.run(scenario())
