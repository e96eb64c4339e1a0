"""``phalanx tune`` as a person meets it."""

from __future__ import annotations

from pathlib import Path

from tests.commands import run_phalanx

TINY = Path(__file__).parents[3] / "examples/tiny.toml"


def test_a_file_that_cannot_be_written_is_noticed_before_the_search(tmp_path: Path) -> None:
    target = tmp_path / "nowhere" / "tuned.toml"
    done = run_phalanx("tune", str(TINY), "--write", str(target), folder=tmp_path)
    said = " ".join(done.stderr.replace("│", " ").split())
    assert done.returncode == 2 and "no folder to write into" in said
    assert not list(tmp_path.iterdir())
