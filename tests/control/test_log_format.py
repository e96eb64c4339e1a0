"""Logs of other versions: older ones are read, newer ones are refused with both versions."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from phalanx import __version__
from phalanx.cluster.policy import Policy
from phalanx.cluster.snapshot import FORMAT_VERSION
from phalanx.control.server.replay import recover
from phalanx.control.server.store.interface import StoreError, StoreFormatError, open_store
from phalanx.control.server.store.sqlite import SqliteStore
from tests.control.damage import LOG, fill, start
from tests.control.log_format import RECORDED, described
from tests.control.sql import change_file

RECORDED_LOGS = sorted(RECORDED.parent.glob("log-format-*.tar.xz"))


def test_a_changed_struct_of_the_log_raises_the_format_version() -> None:
    recorded, now = json.loads(RECORDED.read_text()), described()
    before, types = recorded["types"], now["types"]
    changed = [name for name in {**before, **types} if before.get(name) != types.get(name)]
    changed += ["tables"] if recorded["tables"] != now["tables"] else []
    if changed and recorded["format"] == FORMAT_VERSION:
        pytest.fail(
            f"{', '.join(sorted(changed))} changed: raise FORMAT_VERSION in "
            "phalanx/cluster/snapshot.py, then `python -m tests.control.log_format`"
        )
    assert recorded == now, "record the new format with `python -m tests.control.log_format`"


@pytest.mark.parametrize("archive", RECORDED_LOGS, ids=lambda path: path.name.split(".")[0])
@pytest.mark.parametrize(("how", "jobs"), [("stopped", 20), ("killed", 30)])
def test_a_log_of_an_older_format_is_read_and_protected_from_then_on(
    archive: Path, how: str, jobs: int, tmp_path: Path
) -> None:
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    state = tmp_path / how
    names = sorted(f"job-{number}" for number in range(1, jobs + 1))
    found = start(state)
    assert (found.refusal, found.jobs) == ("", names)
    assert start(state).jobs == names
    store = SqliteStore(state / LOG)
    assert store.stored_format() == FORMAT_VERSION and not store.examined().findings
    store.close()
    change_file(state / LOG, "DELETE FROM snapshots")
    change_file(state / LOG, "DELETE FROM events WHERE sequence > 40")
    assert "were acknowledged and are missing" in start(state).refusal


def test_an_upgrade_that_is_interrupted_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tarfile.open(RECORDED_LOGS[0]) as packed:
        packed.extractall(tmp_path, filter="data")
    state, prepare = tmp_path / "killed", SqliteStore._prepare

    def interrupted(self: SqliteStore, *given: Any) -> None:
        prepare(self, *given)
        raise StoreError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(SqliteStore, "_prepare", interrupted)
        assert start(state).refusal == "no space left on device"
    assert (state / "log.anchor").exists()  # it is written before the tables change
    assert len(start(state).jobs) == 30


def test_a_newer_log_is_refused_with_both_versions_and_left_alone(tmp_path: Path) -> None:
    state = tmp_path / "state"
    fill(state, killed=False, jobs=2)
    change_file(state / LOG, "UPDATE log_format SET version = 99, package = '7.1'")
    before = (state / LOG).read_bytes()
    told = start(state).refusal
    assert "written by phalanx 7.1 (log format 99)" in told
    assert f"this is phalanx {__version__}, which reads formats 1 to {FORMAT_VERSION}" in told
    assert "damaged" not in told and (state / LOG).read_bytes() == before


def test_a_snapshot_of_a_newer_version_is_not_called_damaged(tmp_path: Path) -> None:
    state = tmp_path / "state"
    fill(state, killed=False, jobs=2)
    store = open_store("", state)
    store.lead("http://one", "7.1")
    (newest, *_) = store.snapshots()
    number = b'"version":%d' % FORMAT_VERSION
    core = newest.core.replace(number, b'"version":99', 1)
    store.save_snapshot(structs.replace(newest, version="7.1", core=core))
    with pytest.raises(StoreFormatError, match=r"phalanx 7\.1, this is phalanx .* format 99"):
        recover(store, Policy())
    store.close()
