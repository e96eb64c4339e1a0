"""Words of ``phalanx events``."""

from __future__ import annotations

import pytest

from phalanx.cli.operate.events import print_event
from phalanx.control.wire.api_types import CommandOut, EventOut, Why


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
    assert "title" not in told[0]
