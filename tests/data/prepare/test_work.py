"""Units appear whole or not at all, whoever else writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.data import DataError
from phalanx.data.prepare.units import run_task
from phalanx.data.prepare.work import IdentifyFiles, UnitFailure, UnitPhase, WorkFolder
from tests.data.prepare.raw import recipe

UNIT = IdentifyFiles("key", ("file",))


def test_a_block_that_fails_leaves_nothing(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path)

    def half() -> None:
        with work.commit(work.of(UNIT)) as out:
            (out / "half").touch()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        half()
    assert not work.done(UNIT) and list((tmp_path / "inputs").iterdir()) == []


def test_the_first_of_two_writers_wins_and_the_second_is_no_error(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path)
    with work.commit(work.of(UNIT)) as slow:
        (slow / "result").write_text("slow")
        with work.commit(work.of(UNIT)) as fast:
            (fast / "result").write_text("fast")
    assert (work.of(UNIT) / "result").read_text() == "fast"
    assert len(list((tmp_path / "inputs").iterdir())) == 1


def test_drafts_of_the_dead_are_removed(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path)
    (tmp_path / "inputs/.key.abc").mkdir(parents=True)
    assert not work.done(UNIT)
    work.remove_drafts()
    assert list((tmp_path / "inputs").iterdir()) == []


def test_two_runs_do_not_work_in_one_folder(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path)
    with work.alone(), pytest.raises(DataError, match="another run is using it"), work.alone():
        pass
    with work.alone():
        pass


def test_tasks_share_the_units_of_a_phase(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path / "work")
    units = []
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text(str(number))
        units.append(IdentifyFiles(f"key{number}", (str(tmp_path / f"{number}.txt"),)))
    path = work.write_phase(UnitPhase("inputs", recipe(tmp_path), "", tuple(units)))
    run_task(path, 1, 2)
    assert [work.done(unit) for unit in units] == [False, True, False, True, False]
    run_task(path, 0, 2)
    assert all(map(work.done, units))


def test_a_mistake_is_recorded_for_whoever_waits(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path / "work")
    unit = IdentifyFiles("key", (str(tmp_path / "gone.txt"),))
    run_task(work.write_phase(UnitPhase("inputs", recipe(tmp_path), "", (unit,))), 0, 1)
    failure = work.failure(unit)
    assert isinstance(failure, UnitFailure) and "gone.txt" in failure.rule
    work.forget_failures()
    assert work.failure(unit) is None


def test_a_phase_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="describes no units"):
        run_task(tmp_path / "phases/filter.json", 0, 1)
