"""What is shared is made once, and again only where making it failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shared_folder import VARIABLE, made_once


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
