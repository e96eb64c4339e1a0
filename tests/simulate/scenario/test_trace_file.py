"""Recorded jobs in the formats of Philly, Helios, Acme and Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.config import ConfigError
from phalanx.simulate.scenario.load import load_scenario
from phalanx.simulate.scenario.trace import NO_GPUS, NO_TIME, UNREADABLE, recorded
from phalanx.simulate.scenario.trace_file import REPEATED, STEPS, read_trace

TRACES = Path(__file__).parent / "traces"


def rows(name: str) -> list[tuple[float, float, int, str, float]]:
    """Submission after the first, seconds, GPUs, team and limit of each row."""
    jobs = read_trace(TRACES / name).jobs
    first = min(job.submit for job in jobs)
    return [(job.submit - first, job.seconds, job.gpus, job.team, job.limit) for job in jobs]


def test_reduced_philly_has_durations_and_virtual_clusters() -> None:
    assert rows("philly.csv") == [
        (0.0, 3600.0, 8, "vc-a", 0.0),
        (30.0, 120.0, 1, "vc-b", 0.0),
        (300.0, 600.0, 16, "vc-a", 0.0),
    ]


def test_helios_counts_a_run_by_its_own_stamps_and_queue_is_no_team() -> None:
    assert rows("helios.csv") == [
        (0.0, 3600.0, 8, "vc-a", 0.0),
        (5.0, 60.0, 0, "vc-b", 0.0),
        (30.0, 0.0, 1, "vc-b", 0.0),
        (60.0, 120.0, 4, "vc-b", 0.0),
    ]


def test_acme_has_zones_types_of_work_and_a_duration_that_may_hold_the_wait() -> None:
    assert rows("acme.csv") == [
        (0.0, 120.0, 8, "Other", 0.0),
        (60.0, 3600.0, 64, "Pretrain", 0.0),
    ]


def test_sacct_has_limits_gpus_among_resources_and_steps_that_are_no_jobs() -> None:
    assert rows("sacct.txt") == [
        (0.0, 7200.0, 8, "vision", 4 * 3600.0),
        (300.0, 0.0, 2, "speech", 86400.0),
        (360.0, 86430.0, 2, "speech", 0.0),
        (420.0, 60.0, 0, "speech", 3600.0),
    ]
    assert read_trace(TRACES / "sacct.txt").skipped == {STEPS: 1}


def test_rows_that_cannot_be_read_are_counted_and_named() -> None:
    assert read_trace(TRACES / "philly.csv").unreadable == [
        f"{TRACES / 'philly.csv'}:5: could not convert string to float: 'long'"
    ]
    (told,) = read_trace(TRACES / "helios.csv").unreadable
    assert told.startswith(f"{TRACES / 'helios.csv'}:6: ")
    scenario = load_scenario(
        "multi-tenant", ["workload.kind=csv", f"workload.file={TRACES / 'helios.csv'}"]
    )
    trace = recorded(scenario)
    assert len(trace.jobs) == 2
    assert trace.left_out == {NO_GPUS: 1, NO_TIME: 1, UNREADABLE: 1}


def test_a_recorded_limit_comes_before_the_guess() -> None:
    path = TRACES / "sacct.txt"
    changes = ["workload.kind=csv", "workload.limit_factor=2", "restart.seconds=1"]
    scenario = load_scenario("multi-tenant", [*changes, f"workload.file={path}"])
    limits = [spec.time_limit_ns // 10**9 for _, spec in recorded(scenario).jobs]
    assert limits == [4 * 3600 + 2, 2 * 86430 + 2]


def test_a_file_without_the_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("submit,gpus\n0,8\n")
    with pytest.raises(ConfigError, match="no column for seconds"):
        read_trace(path)
    with pytest.raises(ConfigError, match="no such file"):
        read_trace(tmp_path / "missing.csv")


def test_seconds_and_dates_in_one_column_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("submit_time,gpu_num,duration\n0,8,5\n2020-03-01,8,5\n")
    found = read_trace(path)
    assert len(found.jobs) == 1
    assert found.unreadable == [f"{path}:3: seconds and dates in one column"]


@pytest.mark.parametrize(
    ("text", "jobs", "told"),
    [
        ("0,8,5\n1504521041000,8,5\n", 1, "3: '1504521041000' is too late for seconds"),
        ('0,8,5\n5,8,"5\n6,8,5\n7,8,5\n', 1, "3: a quotation mark opens here and takes in 3"),
        ('0,8,"5\n6",8\n7,8,5\n', 1, "2: a quotation mark opens here and takes in 1"),
        ("0,8,5\n\n5,8,5,9\n", 1, "4: it has more cells than the first line names"),
        ("0,8,5\n5,,5\n", 1, "3: a cell that must have a number is blank"),
    ],
)
def test_a_row_that_would_be_misread_is_named(
    tmp_path: Path, text: str, jobs: int, told: str
) -> None:
    path = tmp_path / "x.csv"
    path.write_text("submit_time,gpu_num,duration\n" + text)
    found = read_trace(path)
    assert len(found.jobs) == jobs
    assert found.unreadable[0].startswith(f"{path}:{told}")


def test_columns_may_stand_between_semicolons_and_come_once(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("submit_time;gpu_num;duration\n0;8;5\n")
    assert [job.gpus for job in read_trace(path).jobs] == [8]
    path.write_text("submit_time,gpu_num,duration,Duration\n0,8,5,6\n")
    with pytest.raises(ConfigError, match="has the column 'duration' 2 times"):
        read_trace(path)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="no names of columns"):
        read_trace(path)


def test_a_row_that_comes_twice_with_its_number_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    rows = "7,0,8,5\n7,0,8,5\n7,60,8,5\n"  # the third: the job was queued again
    path.write_text("job_id,submit_time,gpu_num,duration\n" + rows)
    found = read_trace(path)
    assert [job.submit for job in found.jobs] == [0.0, 60.0]
    assert found.skipped == {REPEATED: 1}


def test_sacct_quotes_nothing_and_a_job_that_got_nothing_has_no_gpus(tmp_path: Path) -> None:
    path = tmp_path / "sacct.txt"
    path.write_text(
        "JobID|JobName|Submit|Start|End|ElapsedRaw|AllocTRES\n"
        '1|"fast|2024-01-01T00:00:00|2024-01-01T00:00:00|2024-01-01T01:00:00|3600|gres/gpu=8\n'
        "2|x|2024-01-01T00:01:00|None|2024-01-01T00:02:00|0|\n"
    )
    found = read_trace(path)
    assert [(job.line, job.gpus, job.seconds) for job in found.jobs] == [(2, 8, 3600.0), (3, 0, 0)]
    assert found.unreadable == []
