"""The event log: nothing acknowledged is lost, and only one server writes."""

from __future__ import annotations

import gzip
import json
import sqlite3
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phalanx.cluster.protocol.events import Event, Hold, Tick
from phalanx.control.server.store.archive import archive_events
from phalanx.control.server.store.chain import START
from phalanx.control.server.store.interface import (
    EventStore,
    StoreBusyError,
    StoreDamagedError,
    StoredSnapshot,
    StoreError,
    StoreLostError,
    command_row,
    event_row,
    open_store,
    tail,
)
from phalanx.control.server.store.repair import truncate
from phalanx.control.server.store.takeover import SqlStore
from tests.limits import file_size_limit

Opener = Callable[[], EventStore]


@pytest.fixture(params=["sqlite", "postgres"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Opens the same store again and again, as servers on it would."""
    opened: list[EventStore] = []
    where = ""
    if request.param == "postgres":
        import psycopg

        url = request.getfixturevalue("postgres_url")
        name = f"t{uuid.uuid4().hex}"
        with psycopg.connect(url, autocommit=True) as session:
            session.execute(f"CREATE DATABASE {name}")
        where = url.replace("/postgres?", f"/{name}?")

    def open_it() -> EventStore:
        opened.append(open_store(where, tmp_path))
        return opened[-1]

    yield open_it
    for store in opened:
        store.close()


def change(store: EventStore, statement: str) -> None:
    """What a damaged disk might do to the tables of a store that leads."""
    with store._writing() as session:  # type: ignore[attr-defined]
        session.execute(statement)


def rows(first: int, last: int) -> list[tuple[int, int, bytes]]:
    return [event_row(Event(n, n * 10, Hold(job=n))) for n in range(first, last + 1)]


def test_events_come_back_in_order_after_the_store_is_opened_again(opener: Opener) -> None:
    store = opener()
    store.lead("http://one", "1.0")
    store.append(rows(1, 3), [])
    store.append(rows(4, 5), [(2, b"what event 2 gave")])
    store.close()
    again = opener()
    events = [Event(n, n * 10, Hold(job=n)) for n in range(1, 6)]
    assert list(tail(again, 0, START, page=2)) == events
    third = again.records(2, 1)[0]
    assert [event.sequence for event in tail(again, 3, third.chain)] == [4, 5]
    assert again.commands([1, 2, 3]) == [(2, b"what event 2 gave")]


def test_a_batch_with_a_known_event_is_stored_not_even_in_part(opener: Opener) -> None:
    store = opener()
    store.lead("http://one", "1.0")
    store.append(rows(1, 2), [])
    with pytest.raises(StoreError):
        store.append([*rows(3, 3), *rows(2, 2)], [])
    assert [row[0] for row in store.events(0, 10)] == [1, 2]
    store.append(rows(3, 3), [])


def test_a_gap_in_the_log_is_noticed(opener: Opener) -> None:
    store = opener()
    store.lead("http://one", "1.0")
    with pytest.raises(StoreError, match="do not follow event 1"):
        store.append([*rows(1, 1), *rows(3, 3)], [])
    store.append(rows(1, 3), [])
    change(store, "DELETE FROM events WHERE sequence = 2")
    with pytest.raises(StoreDamagedError, match="jumps from event 1 to 3"):
        list(tail(store, 0, START))


def test_every_leader_has_a_higher_epoch_and_a_second_one_waits(opener: Opener) -> None:
    first, second = opener(), opener()
    assert first.lead("http://one", "1.0").epoch == 1
    with pytest.raises(StoreBusyError) as busy:
        second.lead("http://two", "1.0")
    assert busy.value.leader == "http://one"
    first.close()
    lead = second.lead("http://two", "1.1")
    assert (lead.epoch, lead.version_before) == (2, "1.0")


def test_the_two_newest_snapshots_are_kept(opener: Opener) -> None:
    store = opener()
    store.lead("http://one", "1.0")
    assert store.snapshots() == []
    store.append(rows(1, 9), [])
    for sequence in (3, 7, 9):
        core = f"core {sequence}".encode()
        store.save_snapshot(
            StoredSnapshot(sequence=sequence, version="1.0", core=core, answers=b"answers")
        )
    found = [(kept.sequence, kept.core) for kept in store.snapshots()]
    assert found == [(9, b"core 9"), (7, b"core 7")]


def test_an_event_set_aside_is_replaced_in_the_log(opener: Opener) -> None:
    store = opener()
    store.lead("http://one", "1.0")
    store.append(rows(1, 3), [])
    store.set_aside(2, "it broke the core")
    assert [type(event.body) for event in tail(store, 0, START)] == [Hold, Tick, Hold]


def test_tokens_are_kept(opener: Opener) -> None:
    store = opener()
    store.lead("http://one", "1.0")
    store.put_tokens({"a": b"first"})
    store.put_tokens({"a": b"changed"})
    store.put_tokens({"b": b"second"})
    assert store.tokens() == [("a", b"changed"), ("b", b"second")]


def test_a_full_disk_refuses_a_batch_and_takes_it_when_there_is_room(tmp_path: Path) -> None:
    store = open_store("", tmp_path)
    store.lead("http://one", "1.0")
    store.append(rows(1, 10), [])
    size = (tmp_path / "log.sqlite-wal").stat().st_size
    large = [(11, 0, bytes(1 << 20))]
    with file_size_limit(size + 10_000), pytest.raises(StoreError, match=r"log\.sqlite"):
        store.append(large, [])
    assert [row[0] for row in store.events(0, 100)] == list(range(1, 11))
    store.append(large, [])
    assert store.events(10, 1)[0][0] == 11
    store.close()


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "log.sqlite").write_bytes(b"this is no database" * 500)
    with pytest.raises(StoreError, match=r"log\.sqlite: file is not a database"):
        open_store("", tmp_path)


def test_the_log_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    open_store("", tmp_path).close()
    assert (tmp_path / "log.sqlite").stat().st_mode & 0o077 == 0


def test_each_commit_of_sqlite_reaches_the_disk(tmp_path: Path) -> None:
    open_store("", tmp_path).close()
    with sqlite3.connect(tmp_path / "log.sqlite") as database:
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"'mysql://x' is no store"):
        open_store("mysql://x", tmp_path)


def test_a_deposed_leader_cannot_write(postgres_url: str, tmp_path: Path) -> None:
    from phalanx.control.server.store.postgres import PostgresStore

    old = PostgresStore(postgres_url, tmp_path / "old.anchor")
    new = PostgresStore(postgres_url, tmp_path / "new.anchor", lease_seconds=0.0)
    first = old.lead("http://old", "1.0").epoch
    # The old one hangs: it holds its session and its lock, but has not renewed.
    assert new.lead("http://new", "1.0").epoch == first + 1
    with pytest.raises(StoreLostError):
        old.append(rows(1, 1), [])
    with pytest.raises(StoreLostError):
        old.renew()
    new.append(rows(1, 1), [])
    assert [row[0] for row in new.events(0, 10)] == [1]
    old.close()
    new.close()


def test_an_epoch_fences_even_a_session_that_lives(postgres_url: str, tmp_path: Path) -> None:
    import psycopg

    from phalanx.control.server.store.postgres import PostgresStore

    store = PostgresStore(postgres_url, tmp_path / "log.anchor")
    store.lead("http://one", "1.0")
    with psycopg.connect(postgres_url, autocommit=True) as session:
        session.execute("UPDATE leader SET epoch = epoch + 1")
    with pytest.raises(StoreLostError, match="another server leads"):
        store.append(rows(2, 2), [])
    store.close()


def test_a_database_that_is_not_there_is_an_error_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot reach PostgreSQL") as found:
        open_store(f"postgresql:///x?host={tmp_path}", tmp_path)
    assert "\n" not in str(found.value)


def test_a_secret_is_made_once_and_stays(opener: Opener) -> None:
    store = opener()
    store.lead("http://one", "1.0")
    made = store.secret("replicas")
    assert len(made) == 32 and store.secret("replicas") == made != store.secret("another")
    store.close()
    again = opener()
    again.lead("http://two", "1.0")
    assert again.secret("replicas") == made


def snapshot(sequence: int) -> StoredSnapshot:
    return StoredSnapshot(sequence=sequence, version="1", core=b"", answers=b"")


def test_old_events_are_archived_and_a_restart_loses_nothing(
    opener: Opener, tmp_path: Path
) -> None:
    store = opener()
    store.lead("http://one", "1.0")
    store.append(rows(1, 100), [command_row(7, [])])
    folder = tmp_path / "archive"
    assert archive_events(store, folder, before_ns=10**18) == 0  # no snapshot: all is needed
    for sequence in (40, 80):
        store.save_snapshot(snapshot(sequence))
    assert archive_events(store, folder, before_ns=200) == 19  # as old as was asked for
    assert archive_events(store, folder, before_ns=10**18) == 21  # up to the older snapshot
    older = store.snapshots()[-1]
    assert [event.sequence for event in tail(store, 40, older.chain)] == list(range(41, 101))
    (first, second) = sorted(folder.iterdir())
    texts = [gzip.decompress(path.read_bytes()) for path in (first, second)]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    assert [line["sequence"] for line in lines] == list(range(1, 41))
    assert lines[4]["body"] == {"kind": "Hold", "job": 5}
    store.drop_events(1000)  # whatever is asked for, what a snapshot needs stays
    older = store.snapshots()[-1]
    assert [event.sequence for event in tail(store, 40, older.chain)] == list(range(41, 101))


def test_a_disk_that_cannot_take_the_archive_keeps_the_events(
    opener: Opener, tmp_path: Path
) -> None:
    store = opener()
    store.lead("http://one", "1.0")
    store.append(rows(1, 10), [])
    store.save_snapshot(snapshot(10))
    (tmp_path / "archive").write_text("a file in its place")
    with pytest.raises(OSError, match="archive"):
        archive_events(store, tmp_path / "archive", before_ns=10**18)
    assert len(store.events(0, 100)) == 10


def test_a_log_that_lost_its_end_is_refused_and_can_be_cut(opener: Opener) -> None:
    store = opener()
    store.lead("http://one", "1.0")
    store.append(rows(1, 9), [])
    change(store, "DELETE FROM events WHERE sequence > 6")
    store.close()
    with pytest.raises(StoreDamagedError, match="events 7 to 9 were acknowledged and are missing"):
        opener().lead("http://two", "1.0")
    cut = opener()
    assert isinstance(cut, SqlStore)
    truncate(cut, 6)
    cut.append(rows(7, 7), [])
    cut.close()
    again = opener()
    again.lead("http://three", "1.0")
    assert [event.sequence for event in tail(again, 0, START)] == list(range(1, 8))


def test_a_changed_event_is_refused(opener: Opener) -> None:
    store = opener()
    store.lead("http://one", "1.0")
    store.append(rows(1, 9), [])
    change(store, "UPDATE events SET time_ns = 7 WHERE sequence = 4")
    store.close()
    with pytest.raises(StoreDamagedError, match="event 4 is damaged"):
        opener().lead("http://two", "1.0")


def test_a_server_whose_anchor_is_old_leads_what_another_has_cut(
    postgres_url: str, tmp_path: Path
) -> None:
    import psycopg

    from phalanx.control.server.store.postgres import PostgresStore

    with psycopg.connect(postgres_url, autocommit=True) as session:
        session.execute("CREATE DATABASE cut")
    url = postgres_url.replace("/postgres?", "/cut?")
    first = PostgresStore(url, tmp_path / "first.anchor")
    first.lead("http://first", "1.0")
    first.append(rows(1, 9), [])
    change(first, "DELETE FROM events WHERE sequence > 6")
    first.close()
    second = PostgresStore(url, tmp_path / "second.anchor")
    truncate(second, 6)
    second.append(rows(7, 12), [])
    second.close()
    again = PostgresStore(url, tmp_path / "first.anchor")
    assert again.lead("http://first", "1.0").epoch == 3
    again.close()


def test_a_kill_between_a_token_and_its_mark_is_no_damage(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opener()
    store.lead("http://one", "1.0")
    store.put_tokens({"a": b"first"})
    acknowledge = type(store)._acknowledge  # type: ignore[attr-defined]

    def killed(self: EventStore, **changed: object) -> None:
        if "keys" not in changed:
            acknowledge(self, **changed)

    monkeypatch.setattr(type(store), "_acknowledge", killed)
    store.put_tokens({"b": b"second"})
    store.close()
    monkeypatch.undo()
    again = opener()
    again.lead("http://two", "1.0")
    assert [token for token, _ in again.tokens()] == ["a", "b"]
