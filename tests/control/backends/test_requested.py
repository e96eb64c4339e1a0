"""Whatever is asked for beside a job reaches its engine, or is refused with what helps."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs
from typer.testing import CliRunner

from phalanx.cli.app import app
from phalanx.cli.jobs.submit import SubmitOptions
from phalanx.cli.queue.schedule_options import ScheduleOptions
from phalanx.config import Backend, ConfigError, Slurm, program_backend
from phalanx.config.backend import Kubernetes
from phalanx.control.backends.requested import OF_LEAD, REFUSED, fitted, lead_words, option
from phalanx.control.backends.site import LONGEST_SECONDS, SITE_SECONDS, SiteQuestions
from phalanx.control.backends.slurm.facts import longest_hours
from phalanx.control.server.http.submission import JobSchedule, RequestedWork
from phalanx.testing.slurm.job import SlurmJob
from phalanx.testing.slurm.sandbox import Sandbox

PROGRAM = RequestedWork(argv=("python", "train.py"))
PARTITIONS = """\
PartitionName=batch Default=YES DefaultTime=NONE MaxNodes=UNLIMITED MaxTime=08:30:00 MinNodes=0
PartitionName=long Default=NO MaxTime=2-00:00:00 State=UP
PartitionName=free Default=NO MaxTime=UNLIMITED State=UP
"""


def script(*words: str) -> str:
    done = CliRunner().invoke(app, ["submit", "--backend", "slurm", *words])
    assert done.exit_code == 0, done.output
    return done.output


def refusal(*words: str) -> str:
    done = CliRunner().invoke(app, ["submit", *words])
    assert done.exit_code == 2, done.output
    return done.output


def test_a_program_takes_settings_of_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--set", "backend.slurm.account=a", "--set", "backend.slurm.partition=p"]
    words += ["--set", "backend.hours=2", "--set", "backend.device=cpu", "--slot-cpus", "4"]
    words += ["--env", "GREETING=good day", "--dry-run", "--", "python", "train.py"]
    made = script(*words)
    for line in ("--account=a", "--partition=p", "--time=0-02:00:00", "--mincpus=4"):
        assert f"#SBATCH {line}\n" in made
    assert "--gpus-per-node" not in made and 'GREETING="good day"\n' in made
    assert '--env-file "$run/environment"' in made


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--minutes", "90"), "--time=0-01:30:00"),
        (("--qos", "high"), "--qos=high"),
        (("--constraint", "h100 & nvlink"), "--constraint=h100&nvlink"),
    ],
)
def test_what_both_have_means_slurms_own(words: tuple[str, ...], line: str) -> None:
    assert f"#SBATCH {line}\n" in script(*words, "--dry-run", "--", "true")


def test_a_job_ends_before_its_time_unless_it_shall_be_requeued() -> None:
    once = structs.replace(PROGRAM, minutes=60)
    assert fitted("slurm", once).minutes == 57  # two for the warning, one that it may come early
    again = fitted("slurm", structs.replace(once, requeue=True))
    assert again.minutes == 0 and again.backend.hours == 1
    with pytest.raises(ConfigError, match="--minutes = 2: leaves no time before the warning"):
        fitted("slurm", structs.replace(once, minutes=2))


def test_two_words_that_differ_are_refused() -> None:
    backend = Backend(hours=3, slurm=Slurm(qos="low"))
    with pytest.raises(ConfigError, match=r"--minutes = .*contradicts backend\.hours"):
        fitted("slurm", structs.replace(PROGRAM, minutes=60, program_backend=backend))
    with pytest.raises(ConfigError, match=r'--qos = "high": contradicts backend\.slurm\.qos'):
        fitted("slurm", structs.replace(PROGRAM, qos="high", program_backend=backend))
    kept = structs.replace(
        PROGRAM, requeue=True, program_backend=Backend(slurm=Slurm(requeue=False))
    )
    with pytest.raises(ConfigError, match="--requeue"):
        fitted("slurm", kept)


@pytest.mark.parametrize(
    "words",
    [
        ("--backend", "slurm", "--priority", "3"),
        ("--backend", "slurm", "--preemptible"),
        ("--backend", "slurm", "--state", "/tmp/x"),
        ("--backend", "slurm", "--server", "http://127.0.0.1:1"),
        ("--backend", "slurm", "--set", "train.steps=3"),
        ("--backend", "ray", "--qos", "high"),
        ("--backend", "ray", "--constraint", "h100"),
        ("--backend", "kubernetes", "--requeue"),
        ("--backend", "slurm", "--webhook", "https://x/y"),
        ("--backend", "slurm", "--share"),
        ("--backend", "slurm", "--minutes", "5", "--time-min", "9"),
        ("--backend", "slurm", "--partition", "a b"),
        ("--backend", "ray", "--after", "12"),
        ("--backend", "ray", "--hold"),
        ("--backend", "kubernetes", "--array", "0-3"),
        ("--backend", "kubernetes", "--deadline", "+1h"),
        ("--set", "train.steps=3"),
    ],
)
def test_what_nobody_would_use_is_refused(words: tuple[str, ...]) -> None:
    said = refusal(*words, "--", "true")
    assert words[-2].removeprefix("--") in said or words[-1].partition(".")[0] in said


def test_a_partition_is_a_queue_of_kubernetes() -> None:
    asked = structs.replace(PROGRAM, schedule=JobSchedule(partition="research"))
    assert fitted("kubernetes", asked).backend.kubernetes.queue == "research"
    other = Backend(kubernetes=Kubernetes(queue="shared"))
    with pytest.raises(
        ConfigError, match=r"--partition = .*contradicts backend\.kubernetes\.queue"
    ):
        fitted("kubernetes", structs.replace(asked, program_backend=other))


@pytest.mark.parametrize("engine", ["slurm", "kubernetes"])
def test_every_option_is_used_or_refused(engine: str) -> None:
    """A new option of ``submit`` has to be decided about here."""
    scheduled = {"job", "argv", "ranks", "folder", "name", "spares", "slot_gpus", "traffic"}
    carried = {"environment", "program_backend", *OF_LEAD}
    own = {"qos", "constraint", "requeue"} if engine == "slurm" else set()
    asked = {*RequestedWork.__struct_fields__, *JobSchedule.__struct_fields__} - {"schedule"}
    carried |= {"budget_gpu_seconds", "budget_micro_dollars"}
    own |= (
        set(JobSchedule.__struct_fields__) - {"webhook"}
        if engine == "slurm"
        else {"held", "partition"}
    )
    assert asked == scheduled | carried | own | set(REFUSED[engine])
    asked = set(RequestedWork.__struct_fields__) - {"schedule"}
    options = {option(name).removeprefix("--") for name in JobSchedule.__struct_fields__}
    assert {name.replace("-", "_") for name in options} == set(ScheduleOptions.__dataclass_fields__)
    not_options = {"job", "argv", "ranks", "folder", "traffic", "environment", "program_backend"}
    assert asked - not_options <= set(SubmitOptions.__dataclass_fields__)


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (("--after", "12", "--after", "slurm:13:fail"), ["--dependency=afterok:12,afternotok:13"]),
        (("--after", "12:any"), ["--dependency=afterany:12", "--kill-on-invalid-dep=yes"]),
        (("--array", "2-10:2%3"), ["--array=2-10:2%3"]),
        (("--begin", "2090-01-02T03:04"), ["--begin=2090-01-02T03:04:00"]),
        (("--deadline", "2090-01-02"), ["--deadline=2090-01-02T00:00:00"]),
        (("--hold",), ["--hold"]),
        (("--exclusive",), ["--exclusive"]),
        (("--partition", "long", "--project", "vision"), ["--partition=long", "--account=vision"]),
        (("--minutes", "90", "--time-min", "20"), ["--time=0-01:30:00", "--time-min=20"]),
        (("--mail", "ann@example.org"), ["--mail-user=ann@example.org"]),
    ],
)
def test_when_after_what_and_how_often_is_slurms_own(
    words: tuple[str, ...], lines: list[str]
) -> None:
    made = script(*words, "--dry-run", "--", "python", "train.py")
    for line in lines:
        assert made.count(f"#SBATCH {line}\n") == 1, line
    assert ("export PHALANX_ARRAY_INDEX=$SLURM_ARRAY_TASK_ID" in made) == ("--array" in words)


def test_a_budget_is_kept_by_the_jobs_own_controller() -> None:
    words = ("--budget-gpu-hours", "2.5", "--budget-dollars", "7")
    made = script(*words, "--dry-run", "--", "python", "train.py")
    assert "--budget-gpu-hours 2.5 --budget-dollars 7" in made.replace("\\\n", "")


def test_the_leading_process_hears_what_was_asked_for() -> None:
    asked = structs.replace(PROGRAM, team="t", retries=7, minutes=12.5, hang_minutes=3)
    words = " ".join(lead_words(asked))
    assert "--name train.py --team t --retries 7 --minutes 12.5 --hang-minutes 3" in words


def test_settings_of_a_program_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"backend\.slurm\.acount.*did you mean"):
        program_backend(["backend.slurm.acount=a"])
    with pytest.raises(ConfigError, match="must be one word that Slurm reads"):
        program_backend(["backend.slurm.account=a b"])


def test_a_time_limit_always_stands_in_the_script() -> None:
    (limit,) = re.findall(r"#SBATCH (--time=\S+)", script("--dry-run", "--", "true"))
    assert limit == "--time=1-00:00:00"


@pytest.mark.parametrize(
    ("partitions", "hours"), [("", 8.5), ("long", 48), ("long,batch", 8.5), ("free", 0), ("x", 0)]
)
def test_no_longer_than_the_partitions_give(partitions: str, hours: float) -> None:
    assert longest_hours(PARTITIONS, partitions) == hours


class SlowSite:
    def __init__(self, seconds: float) -> None:
        self.now, self.seconds, self.asked = 0.0, seconds, 0

    def nodes(self) -> tuple[str, ...]:
        return ()

    def unwanted(self) -> dict[str, str]:
        self.asked += 1
        self.now += abs(self.seconds)
        if self.seconds < 0:
            raise OSError("no answer")
        return {}

    def over(self) -> bool:
        return False


@pytest.mark.parametrize(("seconds", "most"), [(0.01, 720), (2.0, 90), (-10.0, 20)])
def test_an_engine_is_asked_more_seldom_the_slower_it_answers(seconds: float, most: int) -> None:
    site = SlowSite(seconds)
    questions = SiteQuestions(lambda: site.now)
    while site.now < 3600:
        questions.unwanted(site)
        assert SITE_SECONDS <= questions.pause <= LONGEST_SECONDS
        site.now += 0.1
    assert 0 < site.asked <= most


def test_a_program_on_slurm_is_read_after_its_end_without_a_server(
    make_sandbox: Callable[..., Sandbox], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partition, time and variables reach it; its output is in slurm-N.out and in its folder."""
    sandbox = make_sandbox(nodes=1, gpus_per_node=1)
    words = ["--set", "backend.slurm.partition=prod", "--minutes", "30", "--slot-gpus", "1"]
    words += ["--env", "GREETING=good day", "--name", "hello"]
    job = SlurmJob(sandbox, tmp_path, 1, *words, "--", "sh", "-c", 'echo "$GREETING, rank $RANK"')
    assert job.shown("TimeLimit") == "00:30:00" and job.shown("Partition") == "prod"
    assert job.wait_ended(300) == "COMPLETED", job.said()
    assert "good day, rank 0\n" in job.said()
    monkeypatch.chdir(tmp_path)
    for which in (f"slurm:{job.number}", str(job.run)):
        printed = CliRunner().invoke(app, ["logs", which])
        assert printed.exit_code == 0 and "good day, rank 0" in printed.output
    shown = CliRunner().invoke(app, ["show", str(job.run)])
    assert shown.exit_code == 0 and "done:" in shown.output, shown.output
    reported = CliRunner().invoke(app, ["report", str(job.run)])
    assert reported.exit_code == 0, reported.output
    text = Path(reported.output.split()[-1]).read_text()
    assert "hello" in text and "done" in text


@pytest.mark.parametrize("command", ["logs", "show"])
def test_a_run_that_is_not_there_is_told_in_words(command: str) -> None:
    done = CliRunner().invoke(app, [command, "slurm:77"])
    assert done.exit_code == 2 and "no folder of an engine's run" in done.output
