from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.checkpoint.keeper.start import socket_base


def test_sockets_lie_where_the_session_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    assert socket_base() == Path("/run/user/1000")


@pytest.mark.parametrize(
    ("user", "run_is_open", "base"),
    [
        (0, True, "/run/phalanx"),  # nobody else can make a folder there
        (0, False, "/tmp/phalanx-0"),
        (1000, True, "/tmp/phalanx-1000"),
    ],
)
def test_nobody_takes_the_name_of_roots_sockets_first(
    monkeypatch: pytest.MonkeyPatch, user: int, run_is_open: bool, base: str
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(os, "getuid", lambda: user)
    monkeypatch.setattr(os, "access", lambda path, mode: run_is_open)
    assert socket_base() == Path(base)
