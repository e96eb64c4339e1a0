"""Folders of runs whose jobs have the same number on servers that do not know each other."""

from __future__ import annotations

from pathlib import Path
from threading import Barrier, Thread

import pytest

from phalanx.config import job_from_table, resolve
from phalanx.control.worker.run_owner import own_run_folder
from phalanx.train.report.run_folder import OWNER, RunFolder, make

OURS, THEIRS = "0123456789abcdef", "fedcba9876543210"


def test_a_job_keeps_its_folder_and_another_servers_job_has_one_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "tiny" / "job-1"
    for generation in (1, 2, 3):
        assert own_run_folder(folder, OURS, generation) == folder
    beside = folder.with_name("job-1-fedcba98")
    for generation in (2, 3):  # the first may have ended before anybody came that far
        assert own_run_folder(folder, THEIRS, generation) == beside
    assert own_run_folder(folder, OURS, 4) == folder
    assert [each.name for each in folder.parent.iterdir()] == ["job-1"]  # no draft is left


def test_a_folder_without_a_mark_is_that_of_a_job_that_ran_before(tmp_path: Path) -> None:
    folder = tmp_path / "job-1"
    (folder / "checkpoints").mkdir(parents=True)
    assert own_run_folder(folder, OURS, 2) == folder
    assert own_run_folder(folder, OURS, 1) == tmp_path / "job-1-01234567"


def test_where_the_first_generation_stood_aside_all_later_ones_do(tmp_path: Path) -> None:
    folder, beside = tmp_path / "job-1", tmp_path / "job-1-01234567"
    folder.mkdir()
    assert own_run_folder(folder, OURS, 1) == beside
    beside.mkdir()
    assert own_run_folder(folder, OURS, 2) == beside


def test_a_folder_that_was_there_and_is_away_is_not_made_anew(tmp_path: Path) -> None:
    folder, away = tmp_path / "runs" / "job-1", tmp_path / "away"
    assert own_run_folder(folder, OURS, 1) == folder
    folder.parent.rename(away)  # storage that is mounted no longer
    assert own_run_folder(folder, OURS, 2) == folder and not folder.parent.exists()
    away.rename(folder.parent)
    assert own_run_folder(folder, OURS, 3) == folder and (folder / OWNER).read_text() == OURS


def test_whoever_begins_later_makes_the_folder_with_its_mark(tmp_path: Path) -> None:
    job = resolve(job_from_table({"runs": str(tmp_path)}), 1)
    folder = own_run_folder(tmp_path / "job-1", OURS, 2)
    make(job, RunFolder(folder, OURS))
    make(job, RunFolder(folder, THEIRS))  # which never changes it
    assert (folder / OWNER).read_text() == OURS
    assert own_run_folder(tmp_path / "job-1", THEIRS, 1) == tmp_path / "job-1-fedcba98"


def test_ranks_that_come_at_once_agree(tmp_path: Path) -> None:
    folder, ranks = tmp_path / "job-1", 16
    together, chosen = Barrier(ranks), list[tuple[str, Path]]()

    def choose(owner: str) -> None:
        together.wait()
        chosen.append((owner, own_run_folder(folder, owner, 1)))

    threads = [Thread(target=choose, args=((OURS, THEIRS)[i % 2],)) for i in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = (folder / OWNER).read_text()
    for owner, path in chosen:
        assert path == (folder if owner == first else tmp_path / f"job-1-{owner[:8]}")
    assert [each.name for each in tmp_path.iterdir()] == ["job-1"]


def test_a_folder_that_cannot_be_made_is_left_to_who_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    assert own_run_folder(tmp_path / "job-1", OURS, 1) == tmp_path / "job-1"
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_looked_before_the_first_one_came_agrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read = tmp_path / "job-1", Path.read_text

    def late(path: Path) -> str:
        monkeypatch.setattr(Path, "read_text", read)
        try:
            return read(path)
        finally:
            assert own_run_folder(folder, OURS, 1) == folder  # another rank, in between

    monkeypatch.setattr(Path, "read_text", late)
    assert own_run_folder(folder, OURS, 1) == folder
