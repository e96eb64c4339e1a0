"""The same kill under torchrun and under torchft."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

WAIT_SECONDS = 120.0
REPLICAS = 3


@contextmanager
def started(command: list[str], **options: Any) -> Any:
    """A process that ends here with everything that it started, however this ends."""
    process = subprocess.Popen(command, start_new_session=True, **options)
    watch = [sys.executable, "-c", GUARD, str(os.getpid()), str(process.pid)]
    guard = subprocess.Popen(watch, start_new_session=True, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        end_tree(process.pid)
        process.wait()
        guard.kill()
        guard.wait()


# Ends the tree if whoever measures is killed: no rank stays behind.
GUARD = """
import os, signal, sys, time
from pathlib import Path
owner, root = int(sys.argv[1]), int(sys.argv[2])
while os.getppid() == owner:
    time.sleep(0.5)
def tree(pid):
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(each for child in children for each in tree(int(child)))]
for pid in tree(root):
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
"""


def end_tree(pid: int) -> None:
    """SIGKILL of a process and its descendants: torchrun's ranks lead sessions of their own."""
    for each in reversed(tree_of(pid)):
        try:
            os.kill(each, signal.SIGKILL)
        except ProcessLookupError:
            continue


def tree_of(pid: int) -> list[int]:
    """A process and its descendants."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(each for child in children for each in tree_of(int(child)))]


def torchrun(
    root: Path, write_job: Callable[[Path, str, int, str], Path], world: int, times: int
) -> dict[str, Any]:
    """Kills of a rank under torchrun, which restarts all and reads the last checkpoint."""
    job = write_job(
        root, "torchrun", 10**6, 'every = 1\nkeep = 2\nresume = "auto"\nkeeper_lease = 3.0'
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
    command += ["--max-restarts", str(times), "--monitor-interval", "0.1"]
    command += ["-m", "phalanx.train.rank.worker", str(job)]
    # Without it the restart of torch 2.13 finds the keys of the first attempt and fails.
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    seconds: list[float] = []
    known: list[Path] = []
    with (
        (root / "log").open("wb") as log,
        started(command, cwd=root, env=environment, stdout=log, stderr=log) as process,
    ):
        for _ in range(times):
            known = wait_for_checkpoint(root, process, known)
            time.sleep(1.0)
            at = time.monotonic()
            os.kill(rank_pid(process.pid), signal.SIGKILL)
            known = wait_for_checkpoint(root, process, known)
            seconds.append(time.monotonic() - at)
            known = known[:-1]  # the next kill is of the run that is there now
    return {"seconds": seconds}


def wait_for_checkpoint(
    root: Path, process: subprocess.Popen[bytes], known: list[Path]
) -> list[Path]:
    """Until a run that was not known has completed a checkpoint of its own; all runs then."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        found = sorted((root / "runs" / "torchrun").glob("*"))
        new = [run for run in found if run not in known]
        if any(list(run.glob("checkpoints/step-*/manifest.json")) for run in new):
            return found
        if time.monotonic() > deadline or process.poll() is not None:
            raise TimeoutError((root / "log").read_text()[-3000:])
        time.sleep(0.02)


def rank_pid(parent: int) -> int:
    """The last rank's process."""
    return tree_of(parent)[-1]


def torchft(root: Path, times: int) -> dict[str, Any]:
    """From the SIGKILL of one of three replicas to the next step that the other two commit.

    Steps that fail meanwhile, and are tried again, are part of it; nobody takes the place of the
    dead one.
    """
    lighthouse = shutil.which("torchft_lighthouse", path=f"{Path(sys.executable).parent}")
    if importlib.util.find_spec("torchft") is None or lighthouse is None:
        return {"skipped": "torchft is not installed: pip install torchft-nightly"}
    root.mkdir(parents=True, exist_ok=True)
    return {"seconds": [_torchft_gap(root, lighthouse) for _ in range(times)]}


def _torchft_gap(root: Path, lighthouse: str) -> float:
    port = _free_port()
    command = [lighthouse, "--bind", f"127.0.0.1:{port}", "--min_replicas", "1"]
    command += ["--join_timeout_ms", "100", "--quorum_tick_ms", "50"]
    command += ["--heartbeat_timeout_ms", "1000"]
    with ExitStack() as stack:
        log = stack.enter_context((root / "log").open("wb"))
        stack.enter_context(started(command, stdout=log, stderr=log))
        ranks = [
            stack.enter_context(
                started(
                    [sys.executable, "-m", "benchmarks.torchft_replica", str(number)],
                    env={**os.environ, "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"},
                    stdout=subprocess.PIPE,
                    stderr=log,
                )
            )
            for number in range(REPLICAS)
        ]
        steps: list[tuple[float, int, int]] = []  # of the first replica: see _follow
        threading.Thread(target=_follow, args=(ranks[0].stdout, steps), daemon=True).start()
        _wait(lambda: len(steps) > 10 and all(n == REPLICAS for _, n, _ in steps[-5:]), root)
        at, before = time.monotonic(), steps[-1][2]
        ranks[-1].kill()

        def committed() -> list[float]:
            fewer = REPLICAS - 1
            return [t for t, n, step in list(steps) if t > at and n == fewer and step > before]

        _wait(lambda: bool(committed()), root)
        return committed()[0] - at


def _follow(lines: IO[bytes], steps: list[tuple[float, int, int]]) -> None:
    """When each attempt ended, among how many, and how many steps were committed by then."""
    for line in lines:
        said = json.loads(line)
        steps.append((time.monotonic(), said["participants"], said["committed"]))


def _wait(ready: Callable[[], bool], root: Path) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError((root / "log").read_text()[-3000:])
        time.sleep(0.02)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
