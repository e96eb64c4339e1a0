"""The audit log: whole or said to be broken, sent elsewhere, and pushed out by nobody."""

from __future__ import annotations

import http.server
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.control.server.security.audit import (
    ANCHOR,
    DAY_NS,
    NAME,
    Audit,
    AuditRetention,
    older_files,
    read_anchor,
)
from phalanx.control.server.security.audit_check import entries, verify
from phalanx.control.server.security.audit_ship import MOST_WAITING, Shipper, bad_receiver, shipper
from tests.commands import run_phalanx
from tests.control.servers import ServerProcess

START_NS = 1_700_000_000 * 10**9


class Clock:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.now = START_NS

    def __call__(self) -> int:
        return self.now


def written(folder: Path, count: int = 20, rotate_bytes: int = 1 << 20) -> Audit:
    audit = Audit(folder / NAME, rotate_bytes)
    for number in range(count):
        audit.write(f"POST /v1/jobs/{number}", 200, token="t", name="alice")
    return audit


def test_a_log_is_whole_through_files_and_restarts(tmp_path: Path) -> None:
    for _ in range(3):
        written(tmp_path, 20, rotate_bytes=1500).close()
    assert len(older_files(tmp_path / NAME)) > 5
    found = verify(tmp_path)
    assert (found.problem, found.first, found.last, found.lines) == ("", 1, 60, 60)
    assert verify(tmp_path, head=found.head).problem == ""
    assert verify(tmp_path, head="f" * 64).problem
    assert (tmp_path / NAME).stat().st_mode & 0o077 == 0


def changed(text: str) -> str:
    return text.replace("/v1/jobs/7", "/v1/jobs/1", 1)


def left_out(text: str) -> str:
    lines = text.splitlines(keepends=True)
    return "".join([*lines[:7], *lines[8:]])


def cut_off(text: str) -> str:
    return "".join(text.splitlines(keepends=True)[:7])


def swapped(text: str) -> str:
    lines = text.splitlines(keepends=True)
    lines[7], lines[8] = lines[8], lines[7]
    return "".join(lines)


@pytest.mark.parametrize("harm", [changed, left_out, cut_off, swapped])
def test_the_first_broken_line_is_named(tmp_path: Path, harm: Callable[[str], str]) -> None:
    written(tmp_path).close()
    path = tmp_path / NAME
    path.write_text(harm(path.read_text()))
    found = verify(tmp_path)
    assert found.problem and found.broken == 8
    done = run_phalanx("audit", "verify", "--state", str(tmp_path))
    assert done.returncode == 1 and "broken at line 8" in done.stdout


def test_the_last_line_cannot_be_changed_and_whole_files_cannot_go(tmp_path: Path) -> None:
    written(tmp_path, 20, rotate_bytes=1500).close()
    path = tmp_path / NAME
    text = path.read_text()
    path.write_text(text.replace('"status":200', '"status":400'))
    assert verify(tmp_path).problem
    path.write_text(text)
    older_files(path)[0].unlink()
    assert verify(tmp_path).broken == 1
    for file in older_files(path):
        file.unlink()
    path.unlink()
    assert verify(tmp_path).broken == 1


def test_a_server_that_finds_lines_missing_says_so_and_goes_on(tmp_path: Path) -> None:
    written(tmp_path).close()
    path = tmp_path / NAME
    path.write_text(cut_off(path.read_text()))
    audit = Audit(path)
    audit.write("POST /v1/jobs", 201)
    audit.close()
    assert "lines 8 to 20 are missing" in path.read_text()
    assert verify(tmp_path).broken == 8


def test_a_line_that_a_power_cut_tore_is_dropped(tmp_path: Path) -> None:
    written(tmp_path).close()
    with (tmp_path / NAME).open("ab") as file:
        file.write(b'{"number": 21, "bef')
    written(tmp_path, 3).close()
    assert verify(tmp_path).problem == "" and verify(tmp_path).last == 23


def test_a_killed_server_may_leave_the_anchor_one_line_behind(tmp_path: Path) -> None:
    audit = written(tmp_path)
    behind = (tmp_path / ANCHOR).read_bytes()
    audit.write("POST /v1/jobs", 201)
    audit.close()
    (tmp_path / ANCHOR).write_bytes(behind)
    assert verify(tmp_path).problem == ""
    written(tmp_path, 1).close()
    assert verify(tmp_path).problem == "" and verify(tmp_path).last == 22


def test_repeated_refusals_are_one_line_and_a_count(tmp_path: Path) -> None:
    clock = Clock()
    audit = Audit(tmp_path / NAME, now_ns=clock)
    for number in range(5000):
        clock.now += 10**6
        kind = "POST /v1/jobs/{job}/cancel"
        audit.write(f"POST /v1/jobs/{number}/cancel", 404, token="t", name="mallory", kind=kind)
    audit.write("POST /v1/jobs", 201, token="u", name="alice")
    clock.now += 61 * 10**9
    audit.flush()
    audit.close()
    found = list(entries(tmp_path))
    assert [(each.name, each.count) for each in found] == [
        ("mallory", 1),
        ("alice", 1),
        ("mallory", 4999),
    ]
    assert verify(tmp_path).problem == ""


def test_callers_without_a_token_share_a_bounded_number_of_lines(tmp_path: Path) -> None:
    clock = Clock()
    audit = Audit(tmp_path / NAME, now_ns=clock)
    for number in range(20_000):
        audit.write("GET /v1/jobs", 401, client=f"fe80::{number:x}")
    audit.close()
    found = list(entries(tmp_path))
    assert len(found) < 1000
    assert sum(each.count for each in found) == 20_000


def test_long_paths_are_cut(tmp_path: Path) -> None:
    audit = Audit(tmp_path / NAME)
    audit.write("DELETE /v1/tokens/" + "x" * 60_000, 404, name="y" * 10_000, detail="\ud800" * 9999)
    audit.close()
    assert (tmp_path / NAME).stat().st_size < 2500
    assert "(60018 characters)" in (tmp_path / NAME).read_text()


def test_files_go_by_age_and_never_before_their_time(tmp_path: Path) -> None:
    clock = Clock()
    keeping = AuditRetention(days=100, most_bytes=3000, least_days=30)
    audit = Audit(tmp_path / NAME, 1500, keeping, clock)

    def fill(count: int) -> None:
        for number in range(count):
            audit.write(f"POST /v1/jobs/{number}", 200, token="t", name="mallory")

    fill(80)
    kept = len(older_files(tmp_path / NAME))
    assert kept > 8  # far above the size, and too young to go
    for file in older_files(tmp_path / NAME):
        os.utime(file, ns=(clock.now, clock.now))
    clock.now += 31 * DAY_NS
    assert audit.expire() >= kept - 2
    assert verify(tmp_path).problem == ""
    anchor = read_anchor(tmp_path / ANCHOR)
    assert anchor is not None and anchor.first > 1
    audit.close()


def test_a_full_disk_loses_lines_and_says_so(tmp_path: Path) -> None:
    audit = written(tmp_path, 3)
    file, audit._file = audit._file, os.open("/dev/full", os.O_WRONLY)
    audit.write("POST /v1/jobs", 201)
    os.close(audit._file)
    audit._file = file
    audit.write("POST /v1/jobs", 201)
    audit.close()
    assert audit.lost == 1
    assert [each.detail for each in entries(tmp_path)][3] == (
        "1 lines before this one could not be written"
    )
    assert verify(tmp_path).problem == ""


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_lines_reach_a_syslog_socket_as_rfc_5424(tmp_path: Path) -> None:
    where = tmp_path / "log"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(where))
        listening.settimeout(20)
        audit, sent = Audit(tmp_path / NAME), shipper(f"unix:{where}")
        audit.told.append(sent.take)
        audit.write("POST /v1/jobs", 201, name="alice")
        message = listening.recv(8192).decode()
        sent.close()
        audit.close()
    found = re.fullmatch(r"<109>1 [0-9T:.-]+Z \S+ phalanx \d+ audit - (\{.*\})", message)
    assert found is not None and json.loads(found[1])["name"] == "alice"


def test_a_receiver_that_is_away_gets_its_lines_later(tmp_path: Path) -> None:
    got: list[bytes] = []
    down = [True]

    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if not down[0]:
                got.extend(body.split(b"\n"))
            self.send_response(503 if down[0] else 204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as receiver:
        thread = threading.Thread(target=receiver.serve_forever)
        thread.start()
        try:
            sent = shipper(f"http://127.0.0.1:{receiver.server_port}/audit")
            sent._pause_seconds = 0.05
            audit = written(tmp_path, 0)
            audit.told.append(sent.take)
            for number in range(10):
                audit.write(f"POST /v1/jobs/{number}", 201)
            time.sleep(0.2)
            down[0] = False
            wait_until(lambda: sent.sent >= 10)
            sent.close()
            audit.close()
        finally:
            receiver.shutdown()
            thread.join()
    assert [json.loads(line)["number"] for line in got] == list(range(1, 11))


def test_what_does_not_fit_the_queue_is_counted_and_said() -> None:
    got: list[bytes] = []
    gate = threading.Event()

    def send(lines: list[bytes]) -> str:
        gate.wait(20)
        got.extend(lines)
        return ""

    sent = Shipper("slow", send)
    for _ in range(MOST_WAITING + 500):
        sent.take(b"{}")
    lost = sent.lost
    assert lost > 0
    gate.set()
    wait_until(lambda: any(b"were not shipped" in line for line in got))
    sent.close()
    said = [int(each) for each in re.findall(rb"(\d+) lines were not", b"".join(got))]
    assert sum(said) == lost
    assert len(got) - len(said) + lost == MOST_WAITING + 500, "and the rest came"


@pytest.mark.parametrize("where", ["", "unix:", "tcp://x", "udp://", "https://"])
def test_receivers_that_make_no_sense_are_refused(where: str) -> None:
    assert bad_receiver(where)


@pytest.mark.timeout(120)
def test_one_user_cannot_write_the_log_full(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "state") as server:
        mallory = server.token("user", "mallory")
        for number in range(150):
            server.call("DELETE", f"/v1/tokens/{'x' * 30_000}{number}", token=mallory)
        for _ in range(20):
            server.call("POST", "/v1/nodes/x/drain", {}, token=mallory)
        assert (server.state / NAME).stat().st_size < 10_000
        server.kill()
        server.start()
        server.stop()
        assert verify(server.state).problem == ""
        shown = run_phalanx("audit", "--state", str(server.state)).stdout
        assert "mallory POST /v1/nodes/x/drain 403" in shown
