"""Seeds over several processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="plays in one process on one core")
def test_ctrl_c_ends_seeds_that_several_processes_play() -> None:
    command = ["simulate", "llama3-54d", "--seeds", "0:1000", "--processes", "2"]
    running = subprocess.Popen(
        [sys.executable, "-m", "phalanx", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
        while len(children.read_text().split()) < 2:
            assert running.poll() is None
            time.sleep(0.05)
        os.killpg(running.pid, signal.SIGINT)
        assert running.wait(120) == 130  # a thousand seeds take many minutes
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
