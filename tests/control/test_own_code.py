"""Own code on a live cluster: its files go along, and a killed worker changes nothing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from phalanx.config.own_code import digest
from phalanx.testing.chaos.verdict import orphans
from phalanx.testing.local_cluster import TrialCluster
from tests.control.jobs import assert_same, set_options, undisturbed, write_job
from tests.control.server.test_replay import END_SECONDS, reach
from tests.control.test_paths import PROMPT

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model" / "conv_block.py"
STEPS = 16
# Whoever imports it leaves a note with its process.
METRIC = """
import os
from pathlib import Path
from phalanx.train.metric import Metric

with Path({notes!r}).open("a") as notes:
    notes.write(f"{{os.getpid()}}\\n")

class Rate(Metric):
    every = 1

    def measure(self, run, outcome):
        return {{"rate": outcome.learning_rate}}
"""
OWN_MODEL = ("model.module=conv_block:ConvBlock", "model.mlp=relu2", "parallel.pipeline=1")


def test_a_job_of_own_code_goes_on_after_a_kill_with_the_files_that_were_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = undisturbed(tmp_path, STEPS, *OWN_MODEL, f'code.files=["{EXAMPLE}"]')
    monkeypatch.setenv("PHALANX_CHAOS", "1")  # workers let themselves be slowed down
    notes, own = tmp_path / "notes", ("conv_block.py", "own_rate.py")
    shutil.copy(EXAMPLE, tmp_path)
    (tmp_path / "own_rate.py").write_text(METRIC.format(notes=str(notes)), encoding="utf-8")
    texts = {name: (tmp_path / name).read_text(encoding="utf-8") for name in own}
    files = (f"code.files={json.dumps(own)}", 'code.callbacks=["own_rate:Rate"]')
    path = str(write_job(tmp_path, "disturbed", STEPS))
    with TrialCluster(tmp_path, nodes=2, policy=PROMPT.format(spares=0)) as cluster:
        job = cluster.submit(path, *set_options((*OWN_MODEL, *files)))
        for name in own:
            (tmp_path / name).unlink()  # nodes have what was sent, and nothing else
        cluster.pace(job, 0.2)
        commits = cluster.commits(job, world_size=2)
        reach(cluster, commits, 4)
        cluster.signal_worker(0, job)
        cluster.wait(lambda: commits.first_after(1), "recovery", 90)
        cluster.pace(job, 0.0)
        assert cluster.wait_ended(job, END_SECONDS) == "done", cluster.job(job)
        processes = [node.agent for node in cluster.local.nodes] + [cluster.server]
        others = {os.getpid(), *(process.pid for process in processes if process is not None)}
        placed = [
            file
            for node in cluster.local.nodes
            for file in (node.state / "jobs" / str(job) / "work" / "code").rglob("*.py")
        ]
    run = tmp_path / "runs" / "disturbed" / f"job-{job}"
    assert_same(run, expected)
    assert sorted(file.name for file in placed) == sorted(2 * own)
    assert all(file.read_text(encoding="utf-8") == texts[file.name] for file in placed)
    importers = set(map(int, notes.read_text().split()))
    assert len(importers) >= 2 and importers.isdisjoint(others)
    provenance = json.loads((run / "provenance" / "provenance.json").read_text())
    assert provenance["own_code"] == {name: digest(text) for name, text in texts.items()}
    rates = (run / "metrics" / "own.jsonl").read_text().splitlines()
    assert {json.loads(line)["step"] for line in rates} == set(range(1, STEPS + 1))
    assert orphans(tmp_path) == []
