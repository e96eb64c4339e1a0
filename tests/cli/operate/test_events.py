"""Words of ``phalanx events``."""

from __future__ import annotations

import io
import re
import sys
from typing import Any

import pytest

from phalanx.cli.operate import events
from phalanx.cli.operate.events import print_event
from phalanx.control.client import followed_log
from phalanx.control.client.client import ClientError
from phalanx.control.wire.api_types import CommandOut, EventList, EventOut, Why


def test_an_event_is_one_line_that_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "\x1b[2J\x1b[31mfirst\x00\nsecond\tpart\x1b]0;title\x07"
    why = Why(code="x", text=hostile, facts={})
    command = CommandOut(kind="Stop", nodes=1, why=why)
    event = EventOut(
        sequence=7, time_ns=0, kind="DeviceError", body={"detail": hostile}, commands=[command]
    )
    print_event(event, json=False)
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 2 and all(line.isprintable() for line in told)
    assert all("first\N{REPLACEMENT CHARACTER} second part" in line for line in told)
    assert "title" not in told[0] and told[1].startswith("         → Stop to 1 node: ")


def test_an_event_has_a_time_also_where_a_recording_begins(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_event(EventOut(sequence=1, time_ns=0, kind="Submit", body={}, commands=[]), json=False)
    assert re.fullmatch(r" +1 \d\d-\d\d \d\d:\d\d:\d\d Submit\n", capsys.readouterr().out)


def test_each_event_reaches_a_pipe_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(pipe, encoding="utf-8"))
    event = EventOut(sequence=7, time_ns=0, kind="Progress", body={"step": 3}, commands=[])
    print_event(event, json=False)
    assert b"Progress step=3" in pipe.getvalue()


class AwayClient:
    """A server that is away for some requests, and then refuses or answers."""

    def __init__(self, *answers: Exception | EventList) -> None:
        self.answers = list(answers)

    def get(self, path: str, kind: type, **query: Any) -> EventList:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        assert query == {"after": 9, "job": 0, "decided": True}
        return answer


def test_who_follows_waits_for_a_server_that_is_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(followed_log, "FIRST_PAUSE", 0.0)
    asked = {"job": 0, "decided": True}
    page = EventList(events=[], next_after=9)
    away = [ClientError("no server answers")] * 3
    assert events._more(AwayClient(*away, page), 9, asked) == (None, page)  # type: ignore[arg-type]
    told = capsys.readouterr().err
    assert told == "the server is away, trying again: no server answers\n"  # once
    refused = ClientError("the token is revoked", 401, "wrong_token")
    with pytest.raises(ClientError, match="revoked"):
        events._more(AwayClient(refused), 9, asked)  # type: ignore[arg-type]
