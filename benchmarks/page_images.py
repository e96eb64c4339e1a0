"""The documents' pictures: a played fleet of 12,500 nodes, and a real run with kills."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.page import chromium, opened, served, visitor
from benchmarks.played_job import play_slow_rank
from benchmarks.played_runs import play_runs
from phalanx.cli.train.demo import JOB
from phalanx.config import load_job, resolve, to_toml
from phalanx.testing.local_cluster import TrialCluster

SIZES = {"phone": (390, 844), "desk": (1440, 900), "wall": (2560, 1440)}
SETTLE_SECONDS = 0.8  # canvases are drawn in the next frame
STEPS = 120


def picture(page: Any, folder: Path, name: str, whole: bool = False) -> None:
    """What is to be seen now."""
    time.sleep(SETTLE_SECONDS)
    folder.mkdir(parents=True, exist_ok=True)
    # Logs and origins of runs name folders of this machine.
    page.evaluate(
        "for (const each of document.querySelectorAll('pre.log, .run'))"
        " each.closest('.card')?.remove()"
    )
    page.screenshot(path=str(folder / f"{name}.png"), full_page=whole)
    print(f"wrote {folder / name}.png", flush=True)


def of_fleet(running: Any, url: str, state: Path, folder: Path) -> None:
    """The map, on a wall, a desk and a phone."""
    for name, view, size, dark in (
        ("fleet", "fleet", "desk", False),
        ("fleet-jobs-wall", "fleet?colour=job", "wall", True),
        ("fleet-phone", "fleet", "phone", True),
        ("queue", "queue", "desk", False),
        ("plan", "plan", "desk", True),
    ):
        page = visitor(running, url, state, SIZES[size], dark)
        opened(page, url, view)
        picture(page, folder, name)
        page.context.close()


def of_runs(running: Any, root: Path, folder: Path) -> None:
    """Runs over each other, and a job file that is being written."""
    state = root / "runs-shown"
    play_runs(state, 14, 120)
    with served(state) as url:
        for name, view, dark in (
            ("runs", "runs?jobs=5,12,13&smooth=0.6", False),
            ("submit", "submit", False),
        ):
            page = visitor(running, url, state, (1440, 1250 if name == "runs" else 900), dark)
            opened(page, url, view)
            if name == "submit":
                page.wait_for_selector(".drafting .card:not(.pale) .figure")
                page.wait_for_function("() => !document.querySelector('.submit button').disabled")
            picture(page, folder, name)
            page.context.close()


def of_slow_rank(running: Any, root: Path, folder: Path) -> None:
    """The heat map of 12,500 nodes, on one of which a rank became 20 % slower."""
    state = root / "slow"
    play_slow_rank(state, 12_500, 64, 40)
    with served(state) as url:
        page = visitor(running, url, state, SIZES["desk"])
        opened(page, url, "job/1")
        time.sleep(SETTLE_SECONDS)
        card = page.locator("section[aria-label='Step time by rank']")
        card.screenshot(path=str(folder / "slow-rank.png"))
        page.context.close()


def of_run(folder: Path) -> None:
    """The demo's job, of which a worker and a whole node are killed.

    The browser comes after the cluster: each wants an event loop of its own in this thread.
    """
    with tempfile.TemporaryDirectory(prefix="phalanx-page-") as name:
        root = Path(name)
        job = demo_job(root)
        with TrialCluster(root, nodes=4, spares=1) as cluster:
            number = cluster.submit(str(job))
            commits = cluster.commits(number, 4)

            def wait(step: int) -> None:
                cluster.wait(
                    lambda: (c := commits.newest()) and c.step >= step, f"step {step}", 400
                )

            wait(STEPS // 4)
            cluster.signal_worker(1, number, signal.SIGKILL)
            wait(STEPS // 2)
            cluster.kill_node(cluster.node_of(2, number))
            wait(STEPS * 7 // 8)
            with chromium() as running:
                _run_pictures(running, cluster, number, folder)


def demo_job(root: Path) -> Path:
    """The demo's job file with more steps, on its corpus."""
    corpus = root / "corpus"
    command = [sys.executable, "-m", "phalanx", "data", "tokenize", "--stdlib", "--force"]
    job = load_job(JOB, [f"train.steps={STEPS}", f"data.path={corpus}", f"runs={root / 'runs'}"])
    vocab = resolve(job, 4).model.vocab
    command += ["--vocab-size", str(vocab), "--out", str(corpus)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    path = root / "demo.toml"
    path.write_text(to_toml(job))
    return path


def _run_pictures(running: Any, cluster: TrialCluster, number: int, folder: Path) -> None:
    job = f"job/{number}"
    for name, view, size, dark, whole in (
        ("job", job, "desk", False, True),
        ("job-dark", job, "desk", True, False),
        ("job-phone", job, "phone", False, False),
        ("goodput", "goodput", "desk", False, False),
        ("events", "events", "desk", True, False),
    ):
        page = visitor(running, cluster.url, cluster.state, SIZES[size], dark)
        opened(page, cluster.url, view)
        picture(page, folder, name, whole)
        page.context.close()
