"""What a story reveals can be seen in what its commands print."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from docs.generator.stories import outputs
from phalanx.cli.plan.story import heading, output_of, set_scene
from phalanx.simulate.stories.story_file import load_story, story_names
from tests.docs.reader import missing

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", story_names())
def test_the_clues_of_a_story_are_in_what_its_commands_print(name: str) -> None:
    printed = "\n".join(outputs(name))
    assert [clue for clue in load_story(name).clues if clue not in printed] == []


def phalanx(*words: str, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TZ": "UTC", **more}
    return subprocess.run(
        [sys.executable, "-m", "phalanx", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_setting_a_scene_does_not_give_the_cause_away() -> None:
    (write, *others) = load_story("loss-spike").setup
    assert "part == 7" in write and heading(write) == "cat > setup.py <<'END' …"
    assert [heading(each) for each in others] == list(others)


@pytest.mark.soak
def test_a_story_that_is_a_real_run_prints_what_its_page_shows(tmp_path: Path) -> None:
    story = load_story("loss-spike")
    set_scene(story, tmp_path / story.folder)
    for look in story.looks:
        printed = output_of(story, look.run, tmp_path / story.folder)
        assert missing(look.shown, printed) == [], look.run


def test_a_reader_plays_a_story_looks_and_has_it_revealed(tmp_path: Path) -> None:
    opened = phalanx("story", "sudden-rollback", folder=tmp_path)
    assert (
        opened.returncode == 0
        and "export PHALANX_STATE=story-sudden-rollback TZ=UTC" in opened.stdout
    )
    assert "phalanx nodes NODE" in opened.stdout and "n00010" not in opened.stdout  # not yet
    look = load_story("sudden-rollback").looks[0]
    seen = phalanx(*look.run.split()[1:], folder=tmp_path, PHALANX_STATE="story-sudden-rollback")
    assert seen.stdout.rstrip() == outputs("sudden-rollback")[0]
    told = phalanx("story", "sudden-rollback", "--tell", folder=tmp_path, TZ="Asia/Tokyo")
    assert outputs("sudden-rollback")[0] in told.stdout
    revealed = phalanx("story", "sudden-rollback", "--reveal", folder=tmp_path)
    assert "computed wrong numbers" in revealed.stdout
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    refused = phalanx("story", "sudden-rollback", "--into", "mine", folder=tmp_path)
    assert refused.returncode == 2 and "is not this story" in refused.stderr
