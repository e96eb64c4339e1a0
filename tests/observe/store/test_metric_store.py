"""The metric store: what goes in comes out, at every distance, whatever happens to the file."""

from __future__ import annotations

import math
import os
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.observe.store import query
from phalanx.observe.store.metric_store import ColumnRows, MetricStore, open_metrics
from phalanx.observe.store.tables import DAY_NS, HOUR_NS, SECOND_NS, TIERS, Column

START = 1_700_000_000 * SECOND_NS // DAY_NS * DAY_NS
COLUMNS = (Column("loss"), Column("own_seconds", 4), Column("step_seconds", 4))


@pytest.fixture
def store(tmp_path: Path) -> MetricStore:
    return MetricStore(tmp_path / "metrics.sqlite")


def fill(store: MetricStore, rows: int, every_ns: int = SECOND_NS, owner: str = "job:1") -> None:
    table = store.table(owner, "ranks", 1, COLUMNS, {"rows": "rank", "ranks": [0, 1, 2, 3]})
    for step in range(1, rows + 1):
        own = np.asarray([0.1, 0.1, 0.3 if step == rows // 2 else 0.1, 0.1])
        row = {"loss": 1 / step, "own_seconds": own, "step_seconds": 0.4}
        table.append(START + step * every_ns, step, row)
        if step % 50 == 0:
            store.flush()
    store.flush(everything=True)


def loss(store: MetricStore, points: int = 10_000, owner: str = "job:1") -> query.SeriesAnswer:
    return query.series(store, owner, ["ranks"], ["loss"], (START, START + 400 * DAY_NS), points)


def test_every_row_comes_back(store: MetricStore) -> None:
    fill(store, 500)
    found = loss(store)
    assert found.tier == "raw"
    assert found.series["loss"].step == list(range(1, 501))
    assert found.series["loss"].value == [1 / step for step in range(1, 501)]
    assert found.series["loss"].time[0] == START / 1e9 + 1


def test_fewer_points_keep_the_extremes(store: MetricStore) -> None:
    fill(store, 500)
    found = loss(store, 10).series["loss"]
    assert len(found.value) == 10
    assert found.max[0] == 1.0
    assert found.min[-1] == 1 / 500
    assert found.step[-1] == 500


def test_old_rows_are_kept_in_coarser_tiers(store: MetricStore) -> None:
    fill(store, 3000, every_ns=60 * SECOND_NS)  # two days and two hours
    store.keep(START + 3000 * 60 * SECOND_NS)
    found = loss(store)
    assert found.tier == "1min"
    assert found.series["loss"].step[0] <= 2
    assert found.series["loss"].step[-1] == 3000
    recent = (START + 2900 * 60 * SECOND_NS, START + 3000 * 60 * SECOND_NS)
    assert query.series(store, "job:1", ["ranks"], ["loss"], recent, 800).tier == "raw"


def test_what_is_too_old_is_dropped_and_its_room_given_back(store: MetricStore) -> None:
    fill(store, 2000)
    before = store.size_bytes()
    store.keep(START + 900 * DAY_NS)
    assert loss(store).series["loss"].value == []
    assert store.size_bytes() < before / 2


def test_beyond_the_most_bytes_the_oldest_go(store: MetricStore) -> None:
    fill(store, 2000)
    size = store.size_bytes()
    for _ in range(5):
        store.keep(START + HOUR_NS, most_bytes=size // 2)
    assert store.size_bytes() < size


def test_a_straggler_is_seen_from_any_distance(store: MetricStore) -> None:
    fill(store, 4000, every_ns=10 * SECOND_NS)
    for columns in (4000, 300, 20):
        found = query.ranks(store, "job:1", (START, START + 400 * DAY_NS), columns)
        assert found is not None
        worst = [max(value for value in row if value is not None) for row in found.own_seconds]
        assert worst == pytest.approx([0.1, 0.1, 0.3, 0.1], rel=1e-3)


def test_a_coarse_answer_ends_with_the_newest_rows(store: MetricStore) -> None:
    table = store.table("job:1", "ranks", 1, COLUMNS, {"rows": "rank", "ranks": [0, 1, 2, 3]})
    for step in range(1, 3606):
        table.append(START + step * SECOND_NS, step, {"loss": 1.0, "own_seconds": np.full(4, 0.1)})
    store.flush()  # the last bucket is not full, and waits
    found = query.ranks(store, "job:1", (START, START + DAY_NS), 300)
    assert found is not None
    assert (found.tier, found.steps[-1], len(found.steps)) == ("10s", 3605, 300)
    assert loss(store, 300).series["loss"].step[-1] == 3605


def test_rows_that_are_written_between_two_readings_do_no_harm(
    store: MetricStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, 150)
    table = store.table("job:1", "ranks", 1, COLUMNS)
    read = store.read

    def slow_read(*args: Any) -> ColumnRows:
        found = read(*args)
        for step in range(151 + len(written), 156 + len(written)):
            written.append(step)
            row = {"loss": 1.0, "own_seconds": np.ones(4), "step_seconds": 0.4}
            table.append(START + step * SECOND_NS, step, row)
        store.flush(everything=True)
        return found

    written: list[int] = []
    monkeypatch.setattr(store, "read", slow_read)
    found = query.ranks(store, "job:1", (START, START + DAY_NS), 100)
    assert found is not None and written
    assert found.steps[-1] == 150 and len(found.steps) == 100
    assert [len(row) for row in found.step_seconds] == [len(found.steps)] * 4
    assert found.step_seconds[0][0] == pytest.approx(0.4)


def test_a_gang_that_formed_again_goes_on_in_the_same_picture(store: MetricStore) -> None:
    for generation, node in ((1, "a"), (2, "b")):
        facts = {"rows": "rank", "ranks": [0, 1, 2, 3], "nodes": [node] * 4}
        table = store.table("job:1", "ranks", generation, COLUMNS, facts)
        for step in range(10 * generation, 10 * generation + 10):
            row = {"loss": 1.0, "own_seconds": np.ones(4), "step_seconds": 0.4}
            table.append(START + step * SECOND_NS, step, row)
    store.flush(everything=True)
    found = query.ranks(store, "job:1", (START, START + DAY_NS), 100)
    assert found is not None
    assert found.steps == list(range(10, 30))
    assert found.nodes == ["b"] * 4


def test_small_blocks_are_merged_and_nothing_is_lost(store: MetricStore) -> None:
    fill(store, 5000)
    before = loss(store).series["loss"]
    store.keep(START + HOUR_NS)
    (blocks,) = store._database.execute("SELECT count(*) FROM blocks WHERE tier = 0").fetchone()
    assert blocks < 20
    assert loss(store).series["loss"] == before


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308])
def test_numbers_that_are_none_are_unknown_at_every_tier(store: MetricStore, value: float) -> None:
    table = store.table("job:1", "ranks", 1, COLUMNS)
    for step in range(1, 100):
        table.append(START + step * SECOND_NS, step, {"loss": value, "own_seconds": value})
    store.flush(everything=True)
    for tier in range(len(TIERS)):
        (info,) = store.find("job:1", "ranks")
        for name in ("loss", "own_seconds"):
            read = store.read(info, name, tier, 0, 1 << 62)
            shown = query.numbers(read.values["mean"][:, 0].astype(np.float64))
            assert set(shown) <= {None, 1e308}


def test_a_step_that_was_made_again_counts_once(store: MetricStore) -> None:
    table = store.table("job:1", "scalars", 0, [Column("loss")])
    for at, (step, value) in enumerate([(1, 5.0), (2, 4.0), (3, 9.0), (2, 4.0), (3, 3.0)]):
        table.append(START + at * SECOND_NS, step, {"loss": value})
    store.flush(everything=True)
    found = query.series(store, "job:1", ["scalars"], ["loss"], (0, 1 << 62), 800).series["loss"]
    assert (found.step, found.value) == ([1, 2, 3], [5.0, 4.0, 3.0])


def test_a_killed_writer_leaves_what_it_flushed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.sqlite"
    child = os.fork()
    if child == 0:
        try:
            fill(MetricStore(path), 100)
        finally:
            os._exit(9)
    os.waitpid(child, 0)
    assert len(loss(MetricStore(path)).series["loss"].value) == 100


def test_a_file_that_cannot_be_read_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.sqlite"
    path.write_bytes(b"this is no database" * 1000)
    store = open_metrics(path)
    fill(store, 10)
    assert len(loss(store).series["loss"].value) == 10
    assert [each.name for each in tmp_path.glob("*.unreadable-*")]


def test_a_damaged_block_costs_its_own_rows_only(store: MetricStore) -> None:
    fill(store, 200)
    store._database.execute(
        "UPDATE parts SET data = x'00' WHERE name = 'loss' AND block_id IN "
        "(SELECT id FROM blocks WHERE tier = 0 ORDER BY id LIMIT 1)"
    )
    assert loss(store).series["loss"].step == list(range(51, 201))
    store._merge_window(1, 0, 0, 1 << 62)
    assert loss(store).series["loss"].step == list(range(51, 201))


def test_a_full_disk_is_an_error_for_the_caller_and_leaves_the_store_usable(
    store: MetricStore,
) -> None:
    fill(store, 50)
    (pages,) = store._database.execute("PRAGMA page_count").fetchone()
    store._database.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        fill(store, 5000, owner="job:2")
    store._database.execute("PRAGMA max_page_count=1000000")
    fill(store, 100, owner="job:3")
    assert len(loss(store, owner="job:3").series["loss"].value) == 100
