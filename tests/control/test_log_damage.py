"""Whatever happens to the files of a server: it has every acknowledged job, or it says why not."""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs

from phalanx.cluster.protocol.events import EventBody, Hold, Submit
from phalanx.control.server.store.interface import TICK, event_of, open_store
from phalanx.control.server.store.sqlite import SqliteStore
from tests.commands import run_phalanx
from tests.control.damage import ALL_JOBS, JOBS, LOG, damage, fill, flip, start
from tests.control.sql import change_file


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """State folders of a server that was killed and of one that was stopped."""
    root = tmp_path_factory.mktemp("damage")
    fill(root / "killed", killed=True)
    fill(root / "stopped", killed=False)
    return {"killed": root / "killed", "stopped": root / "stopped"}


@pytest.fixture
def killed(folders: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders["killed"], tmp_path / "state"))


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_an_undamaged_log_has_every_job(folders: dict[str, Path], how: str, tmp_path: Path) -> None:
    state = Path(shutil.copytree(folders[how], tmp_path / "state"))
    assert start(state).jobs == ALL_JOBS
    assert start(state).jobs == ALL_JOBS  # and again, with what the first start wrote


def single_corruptions(folders: dict[str, Path], work: Path, seeds: range) -> None:
    for seed in seeds:
        chance = random.Random(seed)
        state = Path(shutil.copytree(folders[chance.choice(["killed", "stopped"])], work))
        what = damage(state, chance)
        try:
            found = start(state)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {what}: not refused in words") from error
        assert found.refusal or found.jobs == ALL_JOBS, f"seed {seed}: {what}: {found}"
        shutil.rmtree(state)


def test_a_single_corruption_loses_no_job_silently(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    single_corruptions(folders, tmp_path / "state", range(40))


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_no_single_corruption_of_thousands_loses_a_job_silently(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    first, count = (
        int(os.environ.get(name, usual))
        for name, usual in (("PHALANX_DAMAGE_SEED", 1000), ("PHALANX_DAMAGES", 3000))
    )
    single_corruptions(folders, tmp_path / "state", range(first, first + count))


def test_a_deleted_wal_is_noticed(killed: Path) -> None:
    (killed / f"{LOG}-wal").unlink()
    told = start(killed).refusal
    assert "acknowledged" in told or "missing" in told
    assert "Nothing was changed" in told and "phalanx server repair" in told


def test_a_deleted_log_does_not_begin_anew(killed: Path) -> None:
    (killed / LOG).unlink()
    wal = (killed / f"{LOG}-wal").read_bytes()
    assert "log.sqlite is missing or empty" in start(killed).refusal
    assert (killed / f"{LOG}-wal").read_bytes() == wal  # what can be saved still can be


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.999])
def test_a_cut_wal_is_refused_and_left_as_it_is(killed: Path, part: float) -> None:
    wal = killed / f"{LOG}-wal"
    os.truncate(wal, int(wal.stat().st_size * part))
    before = wal.read_bytes()
    assert "damaged" in start(killed).refusal
    assert wal.read_bytes() == before


def test_a_flipped_bit_in_the_wal_is_refused(killed: Path) -> None:
    wal = killed / f"{LOG}-wal"
    flip(wal, wal.stat().st_size // 2, 3)
    assert "damaged" in start(killed).refusal


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("UPDATE events SET body = x'c1' WHERE sequence = {n}", "event {n} is damaged"),
        ("UPDATE events SET time_ns = time_ns + 1 WHERE sequence = {n}", "event {n} is damaged"),
        ("UPDATE events SET body = NULL WHERE sequence = {n}", "event {n} is damaged"),
        ("DELETE FROM events WHERE sequence = {n}", "events {n} to {n} are missing"),
        ("DELETE FROM events WHERE sequence > {n}", "were acknowledged and are missing"),
        ("DELETE FROM tokens WHERE id = (SELECT max(id) FROM tokens)", "tokens or secrets"),
        ("UPDATE tokens SET record = x'00'", "tokens or secrets are missing or damaged"),
        ("DELETE FROM epochs", "the term of a leader is missing"),
    ],
)
def test_what_was_acknowledged_is_missed_by_name(killed: Path, statement: str, told: str) -> None:
    number = after_snapshot(killed)
    change_file(killed / LOG, statement.format(n=number))
    assert told.format(n=number) in start(killed).refusal


def after_snapshot(state: Path) -> int:
    """An event that is not in the newest snapshot: ticks fall anywhere between submissions."""
    store = open_store("", state)
    newest = store.snapshots()[0].sequence
    store.close()
    return newest + 5


def test_an_older_snapshot_is_used_where_the_newest_is_damaged(killed: Path) -> None:
    newest = "(SELECT max(sequence) FROM snapshots)"
    change_file(killed / LOG, f"UPDATE snapshots SET core = x'00' WHERE sequence = {newest}")
    assert start(killed).jobs == ALL_JOBS
    assert start(killed).jobs == ALL_JOBS


def test_all_events_are_replayed_where_every_snapshot_is_damaged(killed: Path) -> None:
    change_file(killed / LOG, "UPDATE snapshots SET core = x'00'")
    assert start(killed).jobs == ALL_JOBS


def test_snapshots_that_are_whole_and_make_no_sense_are_passed_over(killed: Path) -> None:
    store = open_store("", killed)
    store.lead("http://one", "1")
    newest = store.snapshots()[0]
    store.save_snapshot(structs.replace(newest, core=b'{"version": 2}'))
    store.close()
    assert start(killed).jobs == ALL_JOBS
    assert start(killed).jobs == ALL_JOBS


def test_an_event_that_is_whole_and_makes_no_sense_is_set_aside(killed: Path) -> None:
    store = SqliteStore(killed / LOG)
    store.lead("http://one", "1")
    last = store.records(0, 1000)[-1].sequence
    store.append([(last + 1, 0, b"\xc1"), (last + 2, 0, TICK)], [])
    store.close()
    assert start(killed).jobs == ALL_JOBS
    store = SqliteStore(killed / LOG)
    assert [each.sequence for each in store.records(0, 1000) if each.aside] == [last + 1]
    store.close()


def test_a_missing_anchor_is_said_and_taken_from_the_log_when_told(killed: Path) -> None:
    (killed / "log.anchor").unlink()
    assert "its anchor file is missing" in start(killed).refusal
    assert repair(killed).returncode == 1
    last = sound_until(killed)
    assert repair(killed, "--truncate-after", str(last), "--yes").returncode == 0
    assert start(killed).jobs == ALL_JOBS


def test_repair_shows_what_would_be_lost_before_it_cuts(killed: Path) -> None:
    damaged = after_snapshot(killed)
    change_file(killed / LOG, f"UPDATE events SET body = x'c1' WHERE sequence = {damaged}")
    shown = repair(killed)
    assert shown.returncode == 1 and f"event {damaged} is damaged" in shown.stdout
    sound = str(damaged - 1)
    assert f"--truncate-after {sound}" in shown.stdout and "job-29" in shown.stdout
    again = repair(killed, "--truncate-after", sound)
    assert "add --yes" in again.stdout and start(killed).refusal
    done = repair(killed, "--truncate-after", sound, "--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    (kept,) = killed.glob("log-before-repair-*")
    assert (kept / LOG).exists()
    found = start(killed).jobs
    assert 0 < len(found) < JOBS and set(found) < set(ALL_JOBS)
    assert start(killed).jobs == found


def test_repair_gives_up_a_single_damaged_event(tmp_path: Path) -> None:
    state = tmp_path / "state"
    fill(state, killed=True, holds=True)
    (hold,) = (sequence for sequence, body in bodies(state).items() if isinstance(body, Hold))
    change_file(
        state / LOG, f"UPDATE events SET body = x'c1', time_ns = 1 << 62 WHERE sequence = {hold}"
    )
    assert f"--set-aside {hold}" in repair(state).stdout
    done = repair(state, "--set-aside", str(hold), "--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    assert start(state).jobs == ALL_JOBS


def test_a_submission_is_not_set_aside_because_later_jobs_would_have_other_numbers(
    killed: Path,
) -> None:
    submitted = [sequence for sequence, body in bodies(killed).items() if isinstance(body, Submit)]
    damaged, job = submitted[-5], JOBS - 4
    change_file(killed / LOG, f"UPDATE events SET body = x'c1' WHERE sequence = {damaged}")
    assert "--set-aside" not in repair(killed).stdout
    refused = repair(killed, "--set-aside", str(damaged), "--yes")
    assert refused.returncode == 1
    told = f"event {damaged} submitted job {job}: without it later jobs would have"
    assert told in refused.stderr


def test_of_a_log_that_was_in_its_wal_alone_nothing_is_left_and_that_is_said(
    tmp_path: Path,
) -> None:
    state = tmp_path / "state"
    fill(state, killed=True, jobs=2)
    for tail in ("-wal", "-shm"):
        (state / f"{LOG}{tail}").unlink(missing_ok=True)
    assert open_tables(state) == []
    for options in ((), ("--truncate-after", "0", "--yes")):
        told = repair(state, *options)
        assert told.returncode == 1
        assert "nothing is left that could be repaired: restore a backup" in told.stderr


def open_tables(state: Path) -> list[str]:
    with sqlite3.connect(state / LOG) as database:
        return [row[0] for row in database.execute("SELECT name FROM sqlite_master")]


def test_repair_refuses_what_it_cannot_do(killed: Path) -> None:
    damaged = after_snapshot(killed)
    change_file(killed / LOG, f"UPDATE events SET body = x'c1' WHERE sequence = {damaged}")
    told = repair(killed, "--truncate-after", str(damaged + 1), "--yes").stderr
    assert f"sound up to event {damaged - 1}" in told
    assert "cannot be set aside" in repair(killed, "--set-aside", "3", "--yes").stderr


def test_repair_leaves_the_log_of_a_running_server_alone(killed: Path) -> None:
    server = SqliteStore(killed / LOG)
    server.lead("http://one", "1")
    assert "a server already runs" in repair(killed, "--truncate-after", "9", "--yes").stderr
    assert not list(killed.glob("log-before-repair-*"))
    assert repair(killed).returncode == 0
    server.close()


def bodies(state: Path) -> dict[int, EventBody]:
    """What the events of a log say, by their number."""
    store = open_store("", state)
    records = store.records(0, 1000)
    store.close()
    return {each.sequence: event_of((each.sequence, 0, each.body)).body for each in records}


def repair(state: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return run_phalanx("server", "repair", "--state", str(state), *options)


def sound_until(state: Path) -> int:
    return int(json.loads(repair(state, "--json").stdout)["sound_until"])


def test_the_command_refuses_a_damaged_log_with_a_sentence(killed: Path) -> None:
    (killed / f"{LOG}-wal").unlink()
    command = [sys.executable, "-m", "phalanx", "up", "--state", str(killed), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.startswith("error: ") and "phalanx server repair" in done.stderr
