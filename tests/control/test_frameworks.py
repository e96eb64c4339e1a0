"""Scripts of other libraries run to their end, unchanged, and come back after a kill."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from phalanx.testing.local_cluster import TrialCluster
from phalanx.testing.local_processes import worker_pids

SCRIPTS = Path(__file__).parent / "frameworks"
SILENT_SECONDS = 600
SILENT = f"echo begins; sleep {SILENT_SECONDS}; echo ends"


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    words = f"{', '.join(missing)} not installed: pip install 'phalanx[frameworks]'"
    return pytest.mark.skipif(bool(missing), reason=words)


@pytest.mark.parametrize(
    ("script", "resumed"),
    [
        pytest.param("plain_ddp.py", "begins after step 10", id="ddp"),
        pytest.param(
            "hf_trainer.py",
            "begins after hf/checkpoint-10",
            id="transformers",
            marks=[pytest.mark.soak, needs("transformers", "accelerate")],
        ),
        pytest.param(
            "lightning_fit.py",
            "begins after lightning/last.ckpt",
            id="lightning",
            marks=[pytest.mark.soak, needs("lightning")],
        ),
        pytest.param(
            "accelerate_loop.py",
            "begins after step 10 with 2 ranks",
            id="accelerate",
            marks=[pytest.mark.soak, needs("accelerate")],
        ),
    ],
)
def test_a_script_comes_back_after_a_kill_and_runs_to_its_end(
    script: str, resumed: str, tmp_path: Path
) -> None:
    for path in SCRIPTS.glob("*.py"):
        shutil.copy(path, tmp_path)
    (tmp_path / "kill-me").touch()
    with TrialCluster(tmp_path, nodes=1, gpus_per_node=2) as cluster:
        job = cluster.submit("--world-size", "2", "--", sys.executable, script)
        cluster.wait((tmp_path / "reached").exists, "the middle of the run", 240)
        os.kill(worker_pids(cluster.node_of(0, job), job)[1], signal.SIGKILL)
        (tmp_path / "kill-me").unlink()
        assert cluster.wait_ended(job, 240) == "done"
        assert cluster.job(job)["generation"] == 2
        log = output(cluster, job)
        assert resumed in log and "ends at step 20" in log
        assert set(worker_pids(cluster.local.nodes[0], job)) == set()


@pytest.mark.soak
@pytest.mark.timeout(4 * SILENT_SECONDS)
def test_a_shell_script_with_a_long_silent_phase_comes_back_and_runs_to_its_end(
    tmp_path: Path,
) -> None:
    with TrialCluster(tmp_path, nodes=1) as cluster:
        job = cluster.submit("--", "sh", "-c", SILENT)
        cluster.wait(lambda: "begins" in output(cluster, job), "its first word", 60)
        time.sleep(SILENT_SECONDS / 8)
        cluster.signal_worker(0, job)
        cluster.wait(lambda: output(cluster, job).count("begins") == 2, "its second start", 60)
        assert cluster.wait_ended(job, 2 * SILENT_SECONDS) == "done"
        assert output(cluster, job).split() == ["begins", "begins", "ends"]
        assert cluster.events("NoProgress", job) == []


def output(cluster: TrialCluster, job: int) -> str:
    found = cluster.root.glob(f"local/nodes/*/jobs/{job}/worker-*.log")
    return "\n".join(path.read_text() for path in found)
