"""Folders of a node's jobs whose server is gone, and another one numbers from 1 again."""

from __future__ import annotations

from pathlib import Path

from phalanx.control.agent.jobs.job_owner import own_job_folder, run_owner
from phalanx.control.agent.jobs.program_notes import ProgramNote, note_program, noted_programs
from phalanx.control.agent.spawn.log_keeping import note_ranks, noted_ranks

OURS, THEIRS, THIRD = (run_owner(name.encode()) for name in ("ours", "theirs", "third"))


def left_by(folder: Path, text: str) -> None:
    """What a job leaves on a node."""
    (folder / "work").mkdir(parents=True, exist_ok=True)
    (folder / "work" / "result-1").write_text(text)
    (folder / "worker-0.log").write_text(text)
    note_ranks(folder, (4, 5))
    note_program(folder, ProgramNote(job=1, generation=1, ranks=(4, 5), payload=""))


def test_a_jobs_folder_stays_its_own_in_all_generations(tmp_path: Path) -> None:
    folder = tmp_path / "1"
    left_by(folder, "no mark yet")
    for _ in range(3):
        assert own_job_folder(folder, OURS) is None
    assert (folder / "worker-0.log").read_text() == "no mark yet" and noted_ranks(folder) == (4, 5)


def test_what_other_servers_jobs_left_goes_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "1"
    folder.mkdir()
    assert own_job_folder(folder, THEIRS) is None
    left_by(folder, "theirs")
    aside = own_job_folder(folder, OURS)
    assert aside == tmp_path / f"1-{THEIRS[:8]}"
    assert (aside / "work" / "result-1").read_text() == "theirs" and noted_ranks(aside) == (4, 5)
    assert list(folder.iterdir()) == [] and noted_ranks(folder) == ()
    assert noted_programs(tmp_path) == []  # or the next agent would look for its processes
    assert own_job_folder(folder, THEIRS) == tmp_path / f"1-{OURS[:8]}"  # a copy of its state
    left_by(folder, "again")
    assert own_job_folder(folder, THIRD) == tmp_path / f"1-{THEIRS[:8]}.2"
    assert (aside / "worker-0.log").read_text() == "theirs"


def test_a_mark_that_cannot_be_written_fails_no_job(tmp_path: Path) -> None:
    folder = tmp_path / "1"
    folder.mkdir()
    (tmp_path / "1.owner.tmp").mkdir()  # as a full disk would
    assert own_job_folder(folder, OURS) is None and folder.exists()
