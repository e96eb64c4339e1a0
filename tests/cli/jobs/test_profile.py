"""``phalanx profile`` as a person meets it."""

from __future__ import annotations

from pathlib import Path

from tests.commands import run_phalanx

TINY = Path(__file__).parents[3] / "examples/tiny.toml"


def test_options_of_running_jobs_are_refused_for_files(tmp_path: Path) -> None:
    done = run_phalanx("profile", str(TINY), "--ranks", "0,1", folder=tmp_path)
    assert done.returncode == 2 and "of a running job" in " ".join(done.stderr.split())
