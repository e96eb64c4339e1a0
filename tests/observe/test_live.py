"""A real job on a real cluster of this machine: what is measured can be asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.control.client.client import Client, ClientError
from phalanx.testing.local_cluster import TrialCluster
from phalanx.train import StepRecord, read_records
from tests.commands import run_phalanx
from tests.control.jobs import write_job

pytestmark = pytest.mark.timeout(500)  # a cluster and a browser on whatever machine
STEPS = 24


class Done:
    """A finished job and its stage."""

    def __init__(self, cluster: TrialCluster, job: int, folder: Path) -> None:
        self.cluster, self.job, self.folder = cluster, job, folder

    def get(self, path: str) -> Any:
        return self.cluster.get(path.format(job=self.job))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Done]:
    root = tmp_path_factory.mktemp("observed")
    with TrialCluster(root, nodes=2, gpus_per_node=2) as cluster:
        job = cluster.submit(str(write_job(root, "seen", STEPS)))
        assert cluster.wait_ended(job, 300) == "done"
        folder = root / "runs" / "seen" / f"job-{job}"
        done = Done(cluster, job, folder)
        cluster.wait(lambda: len(steps_of(done)) == STEPS, "the last steps to be stored", 120)
        yield done


def steps_of(done: Done) -> list[int]:
    series = done.get("/v1/jobs/{job}/metrics?names=loss")["series"]
    return list(series["loss"]["step"]) if "loss" in series else []


def test_the_servers_curve_is_the_runs_own(done: Done) -> None:
    found = done.get("/v1/jobs/{job}/metrics?names=loss,tokens_per_second_per_gpu,nonsense")
    records = list(read_records(done.folder / "metrics" / "steps.jsonl", StepRecord))
    assert found["tier"] == "raw"
    assert found["series"]["loss"]["value"] == [record.loss for record in records]
    assert found["series"]["loss"]["time"] == sorted(found["series"]["loss"]["time"])
    assert "nonsense" not in found["series"]
    assert len(found["series"]["tokens_per_second_per_gpu"]["value"]) == STEPS


def test_followed_logs_show_the_training_and_end_with_it(done: Done) -> None:
    path = f"/v1/jobs/{done.job}/logs"
    text = b"".join(done.cluster.client.stream(path, rank=0, follow=True)).decode()
    for step in (1, STEPS // 2, STEPS):
        assert f"step {step}/{STEPS}  loss " in text
    assert "first step after" in text


def test_every_rank_is_there_with_its_node_and_its_own_work(done: Done) -> None:
    found = done.get("/v1/jobs/{job}/ranks?parts=true")
    assert found["rows"] == "rank"
    assert found["ranks"] == [0, 1, 2, 3]
    assert len(set(found["nodes"])) == 2
    assert found["steps"] == list(range(1, STEPS + 1))
    for step, own in zip(found["step_seconds"], found["own_seconds"], strict=True):
        assert all(0 <= mine <= whole for whole, mine in zip(step, own, strict=True))
    assert len(found["parts"]["forward_seconds"]) == 4


def test_a_team_sees_nothing_of_anothers_metrics(
    done: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"name": "eve", "role": "user", "team": "other"}
    made = done.cluster.client.post("/v1/tokens", body, dict)
    monkeypatch.setenv("PHALANX_TOKEN", made["secret"])
    eve = Client(done.cluster.url, done.cluster.state)
    for path in ("metrics", "ranks"):
        with pytest.raises(ClientError) as refused:
            eve.get(f"/v1/jobs/{done.job}/{path}", dict)
        assert refused.value.status == 404


def test_the_ledger_sums_exactly_and_its_timeline_too(done: Done) -> None:
    found = done.get("/v1/jobs/{job}/ledger?bins=20")
    total = int(found["allocation_gpu_ns"])
    assert total > 0
    assert sum(int(text) for text in found["buckets"].values()) == total
    added: dict[str, int] = {}
    for part in found["timeline"]:
        for name, text in part["buckets"].items():
            added[name] = added.get(name, 0) + int(text)
    assert added == {name: int(text) for name, text in found["buckets"].items() if int(text)}
    printed = run_cli(done, "ledger", str(done.job), "--json")
    assert printed["buckets"] == found["buckets"]
    shares = done.get("/v1/ledger")["jobs"][str(done.job)]
    assert {name: str(gpu_ns) for name, gpu_ns in shares["buckets"].items()} == found["buckets"]


def test_the_timeline_of_a_job_that_is_over_ends_with_it(done: Done) -> None:
    def end() -> float:
        return float(done.get("/v1/jobs/{job}/ledger?bins=4")["timeline"][-1]["to"])

    before = end()
    done.cluster.wait(lambda: end() == before or end() == end(), "its last sums to be kept", 120)


def test_a_teams_ledger_over_time_sums_to_its_share(done: Done) -> None:
    share = done.get("/v1/ledger")["teams"]["default"]
    found = done.get("/v1/ledger/timeline?bins=10&team=default")
    assert found["allocation_gpu_ns"] == str(share["gpu_ns"])
    assert (
        sum(int(v) for part in found["timeline"] for v in part["buckets"].values())
        == (share["gpu_ns"])
    )
    assert done.get("/v1/ledger/timeline?team=nobody")["allocation_gpu_ns"] == "0"


def test_events_are_told_as_they_were_known_at_a_moment(done: Done) -> None:
    known = done.get("/v1/events?limit=1000")["events"]
    for event in known[:: max(1, len(known) // 7)]:
        past = done.get(f"/v1/events?limit=1000&until_ns={event['time_ns']}")["events"]
        wanted = [each for each in known if each["time_ns"] <= event["time_ns"]]
        assert [each["sequence"] for each in past] == [each["sequence"] for each in wanted]
    assert done.get("/v1/events?until_ns=1")["events"] == []


def test_two_jobs_differ_in_the_setting_that_was_changed_and_nothing_else(done: Done) -> None:
    path = write_job(done.folder.parents[2], "again", STEPS + 1)
    other = done.cluster.submit(str(path))
    assert done.cluster.wait_ended(other, 300) == "done"
    both = [done.job, other]
    done.cluster.wait(
        lambda: all(done.get(f"/v1/runs/{job}")["provenance"] for job in both), "their origin", 120
    )
    found = done.get(f"/v1/runs/diff?a={done.job}&b={other}")["differences"]
    assert [(each["section"], each["key"]) for each in found] == [("settings", "train.steps")]
    told = run_cli(done, "runs", "diff", str(done.job), str(other), "--json")
    assert [(each["section"], each["key"]) for each in told] == [("settings", "train.steps")]


def test_of_too_many_jobs_the_newest_are_listed(done: Done) -> None:
    spec = {"name": "later", "gang": {"slot_gpus": 2, "tensor": 2, "replicas": 2}}
    body = {"spec": spec, "work": {"kind": "Script", "argv": ["sleep", "600"]}}
    made = [done.cluster.client.post("/v1/jobs", body, dict)["jobs"][0] for _ in range(3)]
    try:
        found = done.get("/v1/jobs?state=all&limit=2&newest=true")["jobs"]
        assert [job["id"] for job in found] == made[-2:]
        oldest = done.get("/v1/jobs?state=all&limit=2")["jobs"]
        assert oldest[0]["id"] == done.job
    finally:
        for job in made:
            done.cluster.client.post(f"/v1/jobs/{job}/cancel", None, dict)


def run_cli(done: Done, *arguments: str) -> Any:
    return json.loads(run_cli_text(done, *arguments))


def test_the_run_is_tracked_with_its_origin_and_placement(done: Done) -> None:
    def found() -> Any:
        return done.get("/v1/runs/{job}")

    done.cluster.wait(lambda: found()["provenance"] and found()["checkpoints"], "its origin", 120)
    run = found()
    assert run["state"] == "done"
    assert run["config"]["train"]["steps"] == STEPS
    assert run["provenance"]["packages"]
    assert run["exit"]["message"]
    assert [place["generation"] for place in run["placements"]][-1] == 1
    assert run["checkpoints"][-1]["step"] == STEPS
    assert run["summary"]["step"] == STEPS
    run_cli_text(done, "runs", "note", str(done.job), "good")
    run_cli_text(done, "runs", "tag", str(done.job), "first")
    listed = next(r for r in run_cli(done, "runs", "ls", "--json") if r["id"] == str(done.job))
    assert [note["text"] for note in listed["notes"]] == ["good"]
    assert listed["tags"] == ["first"]
    assert done.get(f"/v1/runs/diff?a={done.job}&b={done.job}")["differences"] == []


def run_cli_text(done: Done, *arguments: str) -> str:
    made = run_phalanx(*arguments, "--state", str(done.cluster.state))
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout
