"""What is shared is made once, and again only where making it failed."""

from __future__ import annotations

import fcntl
from pathlib import Path
from threading import Thread

import pytest

from tests.checkpoint.waiting import eventually
from tests.shared_folder import VARIABLE, made_once, network


def test_what_has_a_name_is_made_once_where_files_share_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def make(folder: Path) -> Path:
        made.append(folder)
        if len(made) == 1:
            raise RuntimeError("no room")
        return folder / "it"

    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(RuntimeError):
        made_once("one", Path("elsewhere"), make)
    first, again = (made_once("one", Path("elsewhere"), make) for _ in range(2))
    assert first == again == made[-1] / "it" and len(made) == 2
    assert made_once("other", Path("elsewhere"), make) != first
    monkeypatch.delenv(VARIABLE)
    assert made_once("one", tmp_path / "alone", make) == tmp_path / "alone" / "it"


def test_who_changes_the_network_waits_for_all_that_must_not_see_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_free(kind: int, name: str = "network") -> bool:
        with (tmp_path / name).open("w") as lock:
            try:
                fcntl.flock(lock, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    def change() -> None:
        with network(changes=True):
            pass

    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with network(), network():
        assert is_free(fcntl.LOCK_SH) and not is_free(fcntl.LOCK_EX)
    with network(changes=True):
        assert not is_free(fcntl.LOCK_SH)
    assert is_free(fcntl.LOCK_EX)
    with network():
        waits = Thread(target=change)
        waits.start()
        assert eventually(lambda: not is_free(fcntl.LOCK_SH, "network-gate"))  # nobody goes first
    waits.join()
    monkeypatch.delenv(VARIABLE)
    with network(changes=True), network(changes=True):
        assert is_free(fcntl.LOCK_EX)
