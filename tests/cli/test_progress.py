"""Bars: for whoever looks at a terminal and has to wait, and for nobody else."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from phalanx.cli import progress
from phalanx.cli.progress import working


class Screen(io.StringIO):
    """Where somebody looks, or not; ``drawn`` is set when a bar is there."""

    def __init__(self, terminal: bool, wanted: str) -> None:
        super().__init__()
        self.terminal, self.wanted, self.drawn = terminal, wanted, threading.Event()

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.wanted in self.getvalue():
            self.drawn.set()
        return written


def test_a_bar_is_drawn_on_a_terminal_once_it_takes_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = Screen(terminal=True, wanted="search mappings")
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress, "WAIT_SECONDS", 0.0)
    monkeypatch.setattr(progress, "LOOK_SECONDS", 0.01)
    with working("search mappings") as passed:
        passed(0.5)
        assert screen.drawn.wait(60)


def test_nothing_is_drawn_for_what_is_done_soon_in_a_pipe_or_as_json(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick = Screen(terminal=True, wanted="quick")
    monkeypatch.setattr(sys, "stderr", quick)
    monkeypatch.setattr(progress, "WAIT_SECONDS", 60.0)
    with pytest.raises(ValueError, match="own"), working("quick"):
        raise ValueError("its own")
    assert quick.getvalue() == ""
    monkeypatch.setattr(progress, "WAIT_SECONDS", 0.0)
    for terminal, quiet in ((False, False), (True, True)):
        unseen = Screen(terminal, wanted="unseen")
        monkeypatch.setattr(sys, "stderr", unseen)
        with working("unseen", quiet) as passed:
            passed(1.0)
        assert unseen.getvalue() == ""
