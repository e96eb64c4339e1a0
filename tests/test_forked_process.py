"""Servers and agents that are forked from a test are processes as if they had been started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.control.servers import ServerProcess
from tests.forked_process import PHALANX, ForkedProcess, start_in_background


def test_a_forked_server_has_its_own_log_and_holds_nothing_of_the_test(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    with ServerProcess(tmp_path) as server:
        process = server.process
        assert isinstance(process, ForkedProcess) and process.poll() is None
        os.close(writer)
        assert os.read(reader, 1) == b""  # BlockingIOError if the server had it, too
        assert os.getsid(process.pid) == os.getsid(0)
        assert "epoch 1" in server.output()  # what it logs, which pytest does not take
        server.stop()
        assert process.returncode == 0
    os.close(reader)


def test_a_forked_command_that_is_refused_has_its_exit_code(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = start_in_background([*PHALANX, "up", "--port", "-1"], log, {})
    assert process.wait(60) == 2 and "--port" in log.read_text()


def test_what_does_not_end_is_waited_for_so_long_and_can_be_killed(tmp_path: Path) -> None:
    words = [*PHALANX, "up", "--state", str(tmp_path / "state"), "--port", "0"]
    process = start_in_background(words, tmp_path / "log", {})
    assert os.getsid(process.pid) in (process.pid, os.getsid(0))  # its own, once it is so far
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    process.kill()
    assert process.wait(60) == -9


def test_a_command_of_somebody_else_is_started_as_it_is(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import os; print(os.environ['GIVEN'])"]
    process = start_in_background(command, tmp_path / "log", {"GIVEN": "word"})
    assert isinstance(process, subprocess.Popen)
    assert process.wait(60) == 0 and (tmp_path / "log").read_text() == "word\n"


USES_TORCH_IN_THREADS = """
import os, threading, torch
from tests.run import remake_thread_pool

torch.ones(1 << 18).add_(1)
torch.set_num_threads(1)  # torch's pool is made, and a fork leaves it broken
os.register_at_fork(after_in_child=remake_thread_pool)
failed = 0
for _ in range(60):
    if not (pid := os.fork()):
        errors, barrier = [], threading.Barrier(8)

        def work():
            barrier.wait()
            try:
                torch.ones(1 << 18).add_(1)
            except RuntimeError as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(8)]
        [thread.start() for thread in threads], [thread.join() for thread in threads]
        os._exit(len(errors))
    failed += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
print(failed, "failed")
"""


def test_threads_of_a_forked_process_may_begin_to_use_torch_at_once() -> None:
    """A seventh of such processes failed where the pool was not made anew."""
    ran = subprocess.run(
        [sys.executable, "-c", USES_TORCH_IN_THREADS], capture_output=True, text=True, check=False
    )
    assert ran.stdout == "0 failed\n", ran.stderr
