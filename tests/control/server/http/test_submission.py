"""What a client sends of a job, and what only the server writes into it."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.cluster.jobs.job import JobSpec
from phalanx.config import ConfigError, job_from_table, resolve
from phalanx.config.own_code import digest
from phalanx.control.server.http.submission import RequestedWork, submission
from phalanx.control.server.http.work_check import WorkError, checked_work
from phalanx.control.wire.api_types import JobRequest
from phalanx.control.wire.payload import CodeFile, TrainingWork, decode_payload, encode_payload


def test_expectations_plan_and_payload_are_the_servers_alone() -> None:
    own = set(JobSpec.__struct_fields__) - set(JobRequest.__struct_fields__)
    assert own == {"expected", "fallbacks", "plan", "payload", "reports_steps"}


@pytest.mark.parametrize(
    ("axes", "slots"), [({"data": 4}, 4), ({"data": 2, "pipeline": 2}, 4), ({"tensor": 4}, 4)]
)
def test_a_job_file_becomes_a_gang_of_its_axes(axes: dict[str, int], slots: int) -> None:
    table = {"name": "x", "model": {"preset": "tiny"}, "parallel": axes}
    job = resolve(job_from_table({**table, "train": {"global_batch": 32, "device": "cpu"}}), 4)
    shape = submission(RequestedWork(job=job, ranks=4), node_gpus=1).spec.gang
    assert (shape.replicas, shape.slots(shape.replicas)) == (job.parallel.data, slots)
    assert (shape.tensor, shape.pipeline) == (job.parallel.tensor, job.parallel.pipeline)


def with_code(folder: Path, *files: str) -> RequestedWork:
    table = {"model": {"preset": "tiny"}, "train": {"device": "cpu"}, "code": {"files": [*files]}}
    job = resolve(job_from_table(table), 1)
    return RequestedWork(job=job, ranks=1, folder=str(folder))


def test_files_of_the_job_s_own_are_sent_with_it_and_come_out_as_they_were(tmp_path: Path) -> None:
    text = 'x = "é"\n\tnot checked here: nobody on the way imports it'
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    work = submission(with_code(tmp_path, "mine.py"), 1).work
    assert isinstance(work, TrainingWork)
    assert work.files == (CodeFile(name="mine.py", sha256=digest(text), text=text),)
    assert decode_payload(encode_payload(work)) == work
    assert checked_work(work) is not None


def test_a_missing_file_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mine\.py.*No such file"):
        submission(with_code(tmp_path, "mine.py"), 1)


BAD_FILES: dict[str, tuple[tuple[str, ...], tuple[CodeFile, ...]]] = {
    "must be those of code.files": (
        ("a.py",),
        (CodeFile(name="b.py", sha256=digest(""), text=""),),
    ),
    "is another text than its digest": (
        ("a.py",),
        (CodeFile(name="a.py", sha256=digest("x"), text="y"),),
    ),
    "is no module's name": (
        ("../a b.py",),
        (CodeFile(name="../a b.py", sha256=digest(""), text=""),),
    ),
    "NUL": (("a.py",), (CodeFile(name="a.py", sha256=digest("\0"), text="\0"),)),
    "must not be longer": (
        ("a.py",),
        (CodeFile(name="a.py", sha256=digest("#" * 200_000), text="#" * 200_000),),
    ),
    "two files of one name": (
        ("a.py", "b/a.py"),
        tuple(CodeFile(name=name, sha256=digest(""), text="") for name in ("a.py", "b/a.py")),
    ),
    "are larger than": (
        ("a.py", "b.py"),
        tuple(
            CodeFile(name=name, sha256=digest("#" * 100_000), text="#" * 100_000)
            for name in ("a.py", "b.py")
        ),
    ),
}


@pytest.mark.parametrize("rule", BAD_FILES)
def test_files_that_are_not_what_the_job_says_are_refused_by_the_server(rule: str) -> None:
    names, files = BAD_FILES[rule]
    toml = f"[model]\npreset = 'tiny'\n[code]\nfiles = {list(names)}\n"
    with pytest.raises(WorkError, match=f"work.files.*{rule}"):
        checked_work(TrainingWork(toml=toml, world_size=1, files=files))
