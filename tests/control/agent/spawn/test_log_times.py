"""Logs since a time: sizes are noted as they grow, and found again."""

from __future__ import annotations

import asyncio
import gzip
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.control.agent.inspect.logs import LogReader
from phalanx.control.agent.spawn import log_times
from phalanx.control.agent.spawn.log_times import LogTimes, bytes_since, marks_path, read_marks
from phalanx.control.wire.agent_messages import LogPart, ReadLog


def written(tmp_path: Path, *lines: tuple[float, bytes]) -> Path:
    """A log to which an agent looked after every line."""
    path = tmp_path / "jobs" / "7" / "worker-3.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    times = LogTimes()
    for at, line in lines:
        with path.open("ab") as file:
            file.write(line)
        times.look(path, 3, at)
    return path


def test_what_was_written_since_a_time_is_the_end_behind_the_last_mark_before(
    tmp_path: Path,
) -> None:
    path = written(tmp_path, (10.0, b"one\n"), (20.0, b"three\n"), (30.0, b"seven\n"))
    marks, size = read_marks(path.parent), path.stat().st_size
    found = [bytes_since(marks, 3, since, size) for since in (5, 10, 19, 20, 29, 31)]
    assert found == [16, 12, 12, 6, 6, 0]
    assert bytes_since(marks, 3, 20) == 6  # it ended as it was noted last
    assert bytes_since(marks, 0, 20, 50) == 50  # nothing is known of that one
    assert bytes_since([*marks, (3, 4, 40.0)], 3, 35, 6) == 6  # emptied meanwhile


def test_marks_are_few_survive_an_agent_and_a_half_written_one_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, (10.0, b"one\n"), (10.2, b"two\n"), (10.4, b""), (12.0, b""))
    assert read_marks(path.parent) == [(3, 4, 10.0), (3, 8, 12.0)]
    LogTimes().look(path, 3, 99.0)  # another agent: it is as it was
    assert len(read_marks(path.parent)) == 2
    with marks_path(path.parent).open("ab") as file:
        file.write(b"half")
    assert len(read_marks(path.parent)) == 2
    written(tmp_path, (101.0, b"three\n"))  # the next one takes its place
    assert read_marks(path.parent)[-1] == (3, 14, 101.0)
    marks_path(path.parent).unlink()
    monkeypatch.setattr(log_times, "MOST_BYTES", 200)
    written(tmp_path, *((float(at), b"more\n") for at in range(100, 200, 2)))
    kept = read_marks(path.parent)
    assert len(kept) <= 10 and kept[-1][1] == path.stat().st_size


def test_an_agent_sends_what_was_written_since_also_of_a_log_that_was_compressed(
    tmp_path: Path,
) -> None:
    now = time.time()
    path = written(tmp_path, (now - 600, b"long ago\n"), (now - 60, b"a minute ago\n"))
    sent: list[LogPart] = []
    node_jobs: Any = SimpleNamespace(state=tmp_path, jobs={})

    async def read() -> bytes:
        sent.clear()
        reader = LogReader(node_jobs, sent.append)  # type: ignore[arg-type]
        reader.read(ReadLog(request=1, job=7, since_seconds=300))
        async with asyncio.timeout(10):
            while not (sent and sent[-1].end):
                await asyncio.sleep(0.005)
        return b"".join(part.data for part in sent)

    assert asyncio.run(read()) == b"a minute ago\n"
    path.with_name("worker-3.log.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    assert asyncio.run(read()) == b"a minute ago\n"
