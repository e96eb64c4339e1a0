"""Sockets of a job that is over go, also where they could not at first."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from phalanx.control.agent import socket_paths
from phalanx.control.agent.socket_paths import clear_away


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of sockets; twice it cannot be removed, as if there were no descriptor to open it with."""
    tries, remove = iter([False, False]), shutil.rmtree
    monkeypatch.setattr(socket_paths, "AGAIN_SECONDS", 0.0)

    def poor(path: Path, ignore_errors: bool) -> None:
        if next(tries, True):
            remove(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(socket_paths.shutil, "rmtree", poor)
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "steps-0").touch()
    return tmp_path / "1"


def test_a_folder_that_cannot_be_removed_is_tried_again(folder: Path) -> None:
    asyncio.run(clear_away(folder, lambda: False))
    assert not folder.exists()


def test_a_job_that_comes_again_keeps_its_sockets(folder: Path) -> None:
    asked = iter([False, True])
    asyncio.run(clear_away(folder, lambda: next(asked)))
    assert folder.exists()
