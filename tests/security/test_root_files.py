"""A job's folder is its user's: whatever lies there, root neither follows it nor waits for it."""

from __future__ import annotations

import asyncio
import gzip
import os
import pwd
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.cluster.protocol.messages import InspectGang
from phalanx.control.agent.hooks import Hook, run_hook
from phalanx.control.agent.inspect.evidence import Evidence
from phalanx.control.agent.inspect.logs import LogReader
from phalanx.control.agent.jobs.keeper_watch import is_listened_to, keeper_pid, what_is_kept
from phalanx.control.agent.jobs.local_job import LocalJob
from phalanx.control.agent.jobs.worker_events import WorkerEvents
from phalanx.control.agent.safe_files import Owner, UnsafeFileError, files_as, make_folder, open_log
from phalanx.control.agent.spawn.log_keeping import compress_ended, cut, expire
from phalanx.control.agent.spawn.output_pump import Pump
from phalanx.control.wire.agent_messages import LogPart, ReadLog
from phalanx.observe.node.ring import RingReader, RingWriter
from tests.security.agents import as_user

REFUSED = (UnsafeFileError, OSError)  # by us, or by the kernel for us
SECRET = "root:$6$hash:19000:0:99999:7:::\n"


@pytest.fixture
def owner(users: tuple[str, str]) -> Owner:
    """The user whose job it is."""
    entry = pwd.getpwnam(users[0])
    return Owner(entry.pw_uid, entry.pw_gid)


@pytest.fixture
def shadow(open_folder: Path) -> Iterator[Path]:
    """A file that only root may read; nothing of it may change in any attack."""
    path = open_folder / "shadow"
    path.write_text(SECRET)
    path.chmod(0o600)
    before = path.stat()
    yield path
    after = path.stat()
    assert path.read_text() == SECRET
    assert (after.st_uid, after.st_mode) == (before.st_uid, before.st_mode)


@pytest.fixture
def folder(open_folder: Path, owner: Owner) -> Path:
    """The folder of job 7, as an earlier agent made it: the user's own."""
    path = open_folder / "jobs" / "7"
    path.mkdir(parents=True)
    os.chown(path, *owner)
    return path


def job(open_folder: Path, owner: Owner) -> LocalJob:
    folder = open_folder / "jobs" / "7"
    folder.mkdir(parents=True, exist_ok=True)
    local_job = LocalJob(7, folder, open_folder / "sockets")
    local_job.owner = owner
    return local_job


def plant(kind: str, path: Path, target: Path) -> None:
    """What a user, or one with more luck than the kernel allows, puts in the place of a file."""
    match kind:
        case "symlink":
            path.symlink_to(target)
        case "hard link":
            path.hardlink_to(target)
        case "pipe":
            os.mkfifo(path)


PLANTED = pytest.mark.parametrize("kind", ["symlink", "hard link", "pipe"])


@PLANTED
def test_a_program_s_output_goes_into_no_planted_file(
    kind: str, folder: Path, shadow: Path, owner: Owner
) -> None:
    plant(kind, folder / "worker-0.log", shadow)
    with pytest.raises(REFUSED):
        Pump("job7/worker0", folder / "worker-0.log", owner)
    with pytest.raises(REFUSED):
        open_log(folder / "worker-0.log", owner)


@PLANTED
def test_a_planted_log_is_not_cut(kind: str, folder: Path, shadow: Path) -> None:
    path = folder / "worker-0.log"
    plant(kind, path, shadow)
    with pytest.raises(REFUSED):
        cut(path, 1, 1)


@PLANTED
def test_a_planted_log_is_shown_to_nobody(kind: str, folder: Path, shadow: Path) -> None:
    plant(kind, folder / "worker-0.log", shadow)
    sent: list[LogPart] = []
    node_jobs: Any = SimpleNamespace(state=folder.parents[1], jobs={})

    async def scenario() -> None:
        reader = LogReader(node_jobs, sent.append)  # type: ignore[arg-type]
        reader.read(ReadLog(request=1, job=7))
        async with asyncio.timeout(60):
            while not (sent and sent[-1].end):
                await asyncio.sleep(0.01)

    asyncio.run(scenario())
    assert b"root:" not in b"".join(part.data for part in sent)
    assert sent[-1].problem


@PLANTED
def test_a_planted_log_is_not_compressed(kind: str, folder: Path, shadow: Path) -> None:
    plant(kind, folder / "worker-0.log", shadow)
    later = time.time() + 10**6
    compress_ended(folder.parent, (), now=later)
    assert not (folder / "worker-0.log.gz").exists()


@PLANTED
def test_compression_writes_into_no_planted_draft(kind: str, folder: Path, shadow: Path) -> None:
    (folder / "worker-0.log").write_text("mine\n")
    plant(kind, folder / "worker-0.log.gz.tmp", shadow)
    compress_ended(folder.parent, (), now=time.time() + 10**6)
    packed = folder / "worker-0.log.gz"
    assert gzip.decompress(packed.read_bytes()) == b"mine\n"
    assert packed.stat().st_uid == 0 and not packed.is_symlink()


def test_expiring_logs_removes_links_and_never_what_they_lead_to(
    folder: Path, shadow: Path
) -> None:
    (folder / "worker-0.log").symlink_to(shadow)
    expire(folder.parent, (), keep_seconds=0.0, now=time.time() + 10**6)
    assert shadow.exists()


@PLANTED
def test_a_hook_s_output_goes_into_no_planted_file(kind: str, folder: Path, shadow: Path) -> None:
    plant(kind, folder / "hooks.log", shadow)
    hook = Hook("prolog", ("/bin/echo", "owned"), 5.0)
    assert "cannot be started" in asyncio.run(run_hook(hook, folder / "hooks.log", {}))


def test_evidence_is_written_into_no_planted_folder_and_chowns_nothing(
    folder: Path, open_folder: Path, owner: Owner
) -> None:
    precious = open_folder / "precious"
    (precious / "generation-1").mkdir(parents=True, mode=0o700)
    (folder / "evidence").symlink_to(precious)
    look_at(job(open_folder, owner))
    assert (precious / "generation-1").stat().st_uid == 0
    assert not any((precious / "generation-1").iterdir())


@PLANTED
def test_evidence_replaces_a_planted_file(
    kind: str, open_folder: Path, shadow: Path, owner: Owner
) -> None:
    local_job = job(open_folder, owner)
    os.close(make_folder(local_job.folder / "evidence"))
    mine = local_job.folder / "evidence" / "generation-1"
    os.close(make_folder(mine, 0o700, owner))
    plant(kind, mine / "rank-0.process", shadow)
    look_at(local_job)
    assert "State:" in (mine / "rank-0.process").read_text()
    assert not (mine / "rank-0.process").is_symlink()


def look_at(local_job: LocalJob) -> None:
    local_job.generation, process = 1, local_job.new_process(0, 0)
    process.pid, local_job.processes[0] = os.getpid(), process
    seen: list[object] = []

    async def scenario() -> None:
        evidence = Evidence({7: local_job}, seen.append)
        evidence.look(InspectGang(job=7, generation=1), 0)
        async with asyncio.timeout(60):
            while not seen:
                await asyncio.sleep(0.01)

    asyncio.run(scenario())


def test_a_user_can_read_a_log_and_neither_replace_it_nor_add_a_file(
    open_folder: Path, owner: Owner
) -> None:
    local_job = job(open_folder, owner)
    local_job.sockets = open_folder / "sockets"
    local_job.make_folders(owner)
    with os.fdopen(open_log(local_job.log(0), owner), "wb") as file:
        file.write(b"step 1\n")
    assert as_user(owner, lambda: local_job.log(0).read_bytes()) == 0
    assert as_user(owner, lambda: (local_job.own_folder / "mine").write_text("x")) == 0
    assert as_user(owner, local_job.log(0).unlink) != 0
    assert as_user(owner, lambda: local_job.log(0).rename(local_job.folder / "other")) != 0
    assert (
        as_user(owner, lambda: (local_job.folder / "worker-1.log").symlink_to("/etc/shadow")) != 0
    )
    assert as_user(owner, local_job.own_folder.rmdir) != 0
    other = Owner(owner.uid + 1, owner.gid + 1)
    assert as_user(other, lambda: local_job.log(0).read_bytes()) != 0
    assert as_user(other, lambda: list(local_job.own_folder.iterdir())) != 0


def test_no_socket_s_owner_is_changed_behind_a_link(
    open_folder: Path, shadow: Path, owner: Owner, users: tuple[str, str]
) -> None:
    """The user replaces the agent's socket by a link again and again while the agent makes it."""
    local_job = job(open_folder, owner)
    local_job.make_folders(owner)
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setgid(owner.gid)
        os.setuid(owner.uid)
        draft = local_job.sockets / "draft"
        until = time.monotonic() + 20
        while time.monotonic() < until:
            try:
                draft.symlink_to(shadow)
                draft.rename(local_job.agent_socket)
            except OSError:
                pass
        os._exit(0)

    async def scenario() -> None:
        for _ in range(200):
            local_job.server = None
            try:
                await worker_events().listen(local_job, users[0])
            except OSError:
                continue
            local_job.close()

    try:
        asyncio.run(scenario())
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def worker_events() -> WorkerEvents:
    return WorkerEvents(lambda fact: None, lambda number: pytest.fail("not asked"), lambda *_: None)


def test_a_keeper_s_socket_leads_to_no_other_user_s_process(
    open_folder: Path, owner: Owner
) -> None:
    """Root would be taken for root there, or kill what it finds."""
    local_job = job(open_folder, owner)
    local_job.make_folders(owner)
    service = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    service.bind(str(open_folder / "docker.sock"))  # of root
    service.listen(8)
    local_job.keeper_socket.symlink_to(open_folder / "docker.sock")
    assert not is_listened_to(local_job.keeper_socket)
    with pytest.raises(PermissionError):
        keeper_pid(local_job.keeper_socket)
    assert asyncio.run(what_is_kept(local_job.keeper_socket, 7)) is None
    service.close()


@PLANTED
def test_a_planted_ring_is_not_read(kind: str, open_folder: Path, owner: Owner) -> None:
    other = open_folder / "other"
    other.mkdir()
    ring = RingWriter(other / "steps-0")  # another's ring: it has the right form
    ring.append(b"secret")
    local_job = job(open_folder, owner)
    local_job.make_folders(owner)
    plant(kind, local_job.sockets / "steps-0", other / "steps-0")
    reader = RingReader(local_job.sockets / "steps-0")
    assert reader.read().bodies == [] and reader.history() == []


def test_a_ring_made_to_keep_the_agent_busy_is_given_up(tmp_path: Path) -> None:
    RingWriter(tmp_path / "steps-0", 1 << 20).close()
    with (tmp_path / "steps-0").open("r+b") as file:
        file.seek(16)
        file.write((1 << 20).to_bytes(8, "little"))
        file.seek(64)
        file.write(
            (0x0000FFFF).to_bytes(4, "little") * (1 << 18)
        )  # a frame seems to begin anywhere
    began = time.process_time()
    assert RingReader(tmp_path / "steps-0").history() == []
    assert time.process_time() - began < 60


def test_files_are_reached_as_a_user_and_then_as_root_again(shadow: Path, owner: Owner) -> None:
    with files_as(owner), pytest.raises(PermissionError):
        shadow.read_text()
    assert shadow.read_text() == SECRET


def test_a_folder_of_somebody_else_is_not_taken(open_folder: Path, owner: Owner) -> None:
    path = open_folder / "taken"
    path.mkdir()
    os.chown(path, owner.uid + 1, owner.gid)
    with pytest.raises(UnsafeFileError):
        make_folder(path, 0o700, owner)
