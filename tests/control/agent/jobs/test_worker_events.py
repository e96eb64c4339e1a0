"""What workers say to their agent: an end without a noise."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from phalanx.cluster.protocol.commands import Flush, Go
from phalanx.cluster.protocol.messages import THIS_NODE, WorkerExited, WorkerFound
from phalanx.cluster.reasons import reason
from phalanx.control.agent.jobs.local_job import LocalJob
from phalanx.control.agent.jobs.worker_events import WorkerEvents, at_own_time
from phalanx.control.agent.jobs.wrapper_exits import last_output
from phalanx.control.host.users import UnknownUserError
from phalanx.control.wire.payload import Script
from phalanx.control.wire.worker_messages import LastGeneration, Present, Take
from phalanx.control.wire.zygote_messages import Ended
from phalanx.control.worker.exit_causes import explained
from phalanx.train.rank.orders import Formation


def test_an_unknown_user_is_found_at_every_attempt(tmp_path: Path) -> None:
    """What comes after it would fail for another reason, which says nothing to anybody."""

    async def listen_twice() -> None:
        local_job = LocalJob(1, tmp_path / "job", tmp_path / "sockets")
        local_job.folder.mkdir()
        for _ in range(2):
            with pytest.raises(UnknownUserError, match="there is no user 'nobody-of-that-name'"):
                await WorkerEvents(unused, unused, unused).listen(local_job, "nobody-of-that-name")
            assert local_job.server is None
        await WorkerEvents(unused, unused, unused).listen(local_job, "")
        assert local_job.server is not None
        local_job.close()

    asyncio.run(listen_twice())


def unused(*_: object) -> Any:
    raise AssertionError("nobody has said anything")


def test_an_agent_that_ends_prints_nothing_of_its_connected_workers(tmp_path: Path) -> None:
    complaints: list[str] = []

    async def end_with_a_worker_connected() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, told: complaints.append(told["message"]))
        met = asyncio.Event()
        worker_events = WorkerEvents(unused, lambda local_job, pid: pid, unused)

        async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            loop.call_soon(met.set)  # once it waits for words
            await worker_events._meet(LocalJob(1, tmp_path, tmp_path), reader, writer)

        path = str(tmp_path / "agent.sock")
        server = await asyncio.start_unix_server(meet, path)
        _, worker = await asyncio.open_unix_connection(path)
        await met.wait()
        own = asyncio.current_task()
        ended = [task for task in asyncio.all_tasks() if task is not own]
        for task in ended:
            task.cancel()
        await asyncio.wait(ended)
        await asyncio.sleep(0)  # the callbacks of those that ended
        worker.close()
        server.close()

    asyncio.run(end_with_a_worker_connected())
    assert complaints == []


@pytest.mark.parametrize(
    ("status", "sent_away", "cause"),
    [
        (-15, True, ""),
        (143, True, ""),
        (-15, False, "worker_killed"),
        (1, True, "user_error"),
        (75, False, "user_error"),  # a code that our own workers use among themselves
    ],
)
def test_a_program_that_was_asked_to_go_did_not_break(
    tmp_path: Path, status: int, sent_away: bool, cause: str
) -> None:
    said: list[Any] = []
    local_job = LocalJob(1, tmp_path, tmp_path / "sockets")
    process = local_job.processes[0] = local_job.new_process(0, 0)
    process.pid, process.sent_away = 77, sent_away
    WorkerEvents(said.append, unused, unused).ended(local_job, Ended(process.key, 77, status))
    (left,) = said
    assert left.cause == cause


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        (137, "worker_killed"),
        (143, "worker_killed"),
        (-9, "worker_killed"),
        (-11, "software_bug"),
        (-7, "bus_error"),
        (135, "bus_error"),
        (15, "user_error"),
        (1, "user_error"),
        (0, ""),
    ],
)
def test_the_status_of_a_program_says_whether_somebody_killed_it(status: int, cause: str) -> None:
    assert explained(status)[0] == cause


TORCHRUN = """
Failures:
[1]:
  exitcode  : {other} (pid: 71)
-------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-03-01_11:13:01
  rank      : 1 (local_rank: 1)
  exitcode  : {first} (pid: 72)  (SIGKILL)
  error_file: <N/A>
=======================================================
"""


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        (TORCHRUN.format(first=-9, other=-15), "worker_killed"),
        (TORCHRUN.format(first=1, other=-15), "user_error"),  # torchrun ended the other one
        (TORCHRUN.format(first=-9, other=-15) + TORCHRUN.format(first=1, other=-9), "user_error"),
        (TORCHRUN.format(first=-11, other=-15), "user_error"),
        (TORCHRUN.format(first=-7, other=-15), "bus_error"),
        ("ProcessExitedException: process 1 terminated with signal SIGKILL\n", "worker_killed"),
        ("CalledProcessError: Command 'x' died with <Signals.SIGTERM: 15>.\n", "worker_killed"),
        ("DataLoader worker (pid 9) is killed by signal: Killed.\n", "worker_killed"),
        ("DataLoader worker (pid 9) is killed by signal: Bus error. It is pos", "bus_error"),
        ("process 1 terminated with signal SIGKILL\nit went on\nValueError: 3\n", "user_error"),
        ("", "user_error"),
    ],
)
def test_a_wrapper_whose_child_was_killed_did_not_fail_by_itself(
    tmp_path: Path, output: str, cause: str
) -> None:
    left = wrapper_left(tmp_path, TORCHRUN.format(first=1, other=1), output)
    assert left.cause == cause


def test_what_an_earlier_generation_printed_explains_nothing(tmp_path: Path) -> None:
    left = wrapper_left(tmp_path, TORCHRUN.format(first=-9, other=-15), "")
    assert left.cause == "user_error"


def test_a_wrappers_log_that_is_no_plain_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(TORCHRUN.format(first=-9, other=-15))
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "fifo")
    assert last_output(tmp_path / "link", 0) == last_output(tmp_path / "fifo", 0) == ""
    assert last_output(tmp_path / "secret", 10**6)  # it was cut since: all of it is new


def wrapper_left(folder: Path, before: str, output: str) -> WorkerExited:
    """What is said of a program that ended with code 1 after this output."""
    said: list[Any] = []
    local_job = LocalJob(1, folder, folder / "sockets")
    local_job.work = Script(argv=("torchrun",))
    process = local_job.processes[0] = local_job.new_process(0, 0)
    local_job.log(0).write_text(before + output)
    process.pid, process.log_start = 77, len(before)
    WorkerEvents(said.append, unused, unused).ended(local_job, Ended(process.key, 77, 1))
    (left,) = said
    assert isinstance(left, WorkerExited)
    return left


@pytest.mark.parametrize(
    ("status", "cause"),
    [(14, "lost_peer"), (15, "checkpoint"), (16, "storage"), (2, "configuration"), (0, "")],
)
def test_the_exit_codes_of_our_own_trainer_are_understood(status: int, cause: str) -> None:
    assert explained(status, ours=True)[0] == cause


def test_a_worker_that_said_why_it_ends_is_not_heard_of_again_in_the_next_generation(
    tmp_path: Path,
) -> None:
    said: list[Any] = []
    replaced: list[Any] = []
    local_job = LocalJob(1, tmp_path, tmp_path / "sockets")
    process = local_job.processes[0] = local_job.new_process(0, 0)
    process.pid, process.generation = 77, 3
    worker_events = WorkerEvents(said.append, unused, lambda _, process: replaced.append(process))
    last = WorkerExited(node=THIS_NODE, job=1, generation=3, rank=0, step=5, cause="keeper_lost")
    worker_events._heard(process, LastGeneration(job=1, generation=3))
    worker_events._heard(process, last)
    # The next generation forms before the process is gone, and the link's thread still answers.
    process.take = Take(job=1, formation=Formation(4, 0, 1, 0))
    process.left, process.generation = False, 4
    worker_events.ended(local_job, Ended(process.key, 77, 15))
    assert said == [last] and replaced == [process]


def test_a_worker_that_ends_before_it_knows_its_place_ends_in_the_one_it_was_given(
    tmp_path: Path,
) -> None:
    said: list[Any] = []
    local_job = LocalJob(1, tmp_path, tmp_path / "sockets")
    process = local_job.processes[0] = local_job.new_process(0, 5)
    process.generation = 3
    worker_events = WorkerEvents(said.append, unused, unused)
    worker_events._heard(process, LastGeneration(job=1, generation=0))
    exit = WorkerExited(job=1, generation=0, node=THIS_NODE, rank=-1, cause="configuration")
    worker_events._heard(process, exit)
    assert process.left and process.last_generation == 3
    assert said == [structs.replace(exit, generation=3, rank=5)]


def test_a_program_that_this_agent_started_is_not_taken_for_one_that_outlived_another(
    tmp_path: Path,
) -> None:
    """Else what it has committed would be forgotten as soon as it says its first word."""
    local_job, told = LocalJob(1, tmp_path, tmp_path), list[object]()
    worker_events = WorkerEvents(told.append, lambda job: local_job, unused)
    present = Present(job=1, index=0, pid=77, generation=3, rank=0, running=True)
    local_job.processes[0] = local_job.new_process(0, 0)
    worker_events._present(local_job, present, None)  # type: ignore[arg-type]
    assert told == [] and local_job.processes[0].pid == 77
    local_job.processes.clear()
    worker_events._present(local_job, present, None)  # type: ignore[arg-type]
    assert told == [WorkerFound(job=1, generation=3, rank=0, step=0, committed=-1)]


def test_leave_to_write_ends_by_the_clock_of_the_node_that_has_it() -> None:
    ahead_ns = 7 * 3600 * 10**9  # of the server's
    order = Flush(reason=reason("fresh"), job=1, generation=1, bytes_per_second=5, until_ns=10**18)
    assert at_own_time(order, -ahead_ns) == structs.replace(order, until_ns=10**18 + ahead_ns)
    go = Go(reason=reason("fresh"), job=1, generation=1)
    assert at_own_time(go, -ahead_ns) == go
