"""What is followed goes on when its server is killed and started again."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from phalanx.control.client import followed_log
from phalanx.control.client.client import ClientError
from phalanx.control.client.followed_log import BackOff
from phalanx.testing.local_cluster import TrialCluster

pytestmark = pytest.mark.timeout(300)
LINES = 40
# It prints two lines by itself, then one each time that it is told to, and its end in the middle.
PROGRAM = """
import pathlib, sys, time
print("line 1\\nline 2\\nhalf a", end="", flush=True)
for number in range(3, {lines} + 1):
    while number > int(pathlib.Path("upto").read_text() or 0):
        time.sleep(0.05)
    print(f" line\\nline {{number}}\\nhalf a", end="", flush=True)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrialCluster]:
    with TrialCluster(tmp_path_factory.mktemp("followed"), nodes=1) as running:
        yield running


class Follower:
    """A command that follows something, as a person starts it."""

    def __init__(self, cluster: TrialCluster, *words: str) -> None:
        self.out, self.err = cluster.root / f"{words[0]}.out", cluster.root / f"{words[0]}.err"
        command = [sys.executable, "-m", "phalanx", *words, "--state", str(cluster.state)]
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(command, stdout=out, stderr=err)

    def has(self, text: str) -> bool:
        return text in self.out.read_text()

    def heard(self) -> int:
        """How often it was told that the server is away."""
        return self.err.read_text().count("the server is away, trying again")


def test_who_follows_a_job_reads_every_line_once_over_restarts_of_the_server(
    cluster: TrialCluster,
) -> None:
    upto = cluster.root / "upto"
    upto.write_text("2")
    program = PROGRAM.format(lines=LINES)
    job = cluster.submit("--name", "prints", "--", sys.executable, "-c", program)
    logs = Follower(cluster, "logs", "-f", str(job), "--rank", "0")
    events = Follower(cluster, "events", "-f", "--job", str(job))
    try:
        cluster.wait(lambda: logs.has("line 2\nhalf a"), "the first lines")
        cluster.wait(events.out.read_text, "the first events")
        cluster.kill_server()
        upto.write_text("20")  # printed while no server is there
        cluster.wait(lambda: logs.heard() == events.heard() == 1, "both to hear that it is away")
        cluster.start_server()
        cluster.wait(lambda: logs.has("line 20\nhalf"), "the lines since")
        cluster.kill_server()
        upto.write_text(str(LINES))  # it also ends while no server is there
        cluster.start_server()
        for follower in (logs, events):
            assert follower.process.wait(120) == 0
    finally:
        for follower in (logs, events):
            follower.process.kill()
            follower.process.wait()
    printed = [f"line {number}\n" for number in range(1, LINES + 1)]
    assert logs.out.read_text() == "half a line\n".join(["".join(printed[:2]), *printed[2:]]) + (
        "half a"
    )
    assert logs.err.read_text().splitlines()[-1].startswith(f"job {job} is done: ")
    told = [
        int(number) for number in re.findall(r"^ *(\d+) \d", events.out.read_text(), re.MULTILINE)
    ]
    stored = cluster.get(f"/v1/events?limit=1000&job={job}")["events"]
    assert told == sorted(set(told)) and {event["sequence"] for event in stored} <= set(told)


def test_a_refusal_is_not_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed_log, "FIRST_PAUSE", 0.0)
    told: list[ClientError] = []
    back_off = BackOff(told.append)
    back_off.wait(ClientError("away"))
    back_off.wait(ClientError("does not lead", 503))
    assert len(told) == 1
    back_off.answered()
    back_off.wait(ClientError("away again"))
    assert len(told) == 2
    with pytest.raises(ClientError, match="no such job"):
        back_off.wait(ClientError("no such job", 404))
