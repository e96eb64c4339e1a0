"""Stories are files: each can be read, played, and looked into with commands of ours."""

from __future__ import annotations

import pytest

from phalanx.cli.app import COMMANDS
from phalanx.config import ConfigError
from phalanx.simulate.stories.story_file import load_story, story_names


@pytest.mark.parametrize("name", story_names())
def test_a_story_has_a_scene_commands_and_clues(name: str) -> None:
    story = load_story(name)
    assert story.scene.strip() and story.reveal.strip() and story.clues
    assert len(story.looks) >= 3
    ours = [each.run.split()[1] for each in story.looks if each.run.startswith("phalanx ")]
    assert len(ours) >= 3 and set(ours) <= set(COMMANDS)
    assert all(bool(each.shown) == bool(story.setup) for each in story.looks)
    assert bool(story.scenario) != bool(story.setup)
    if story.scenario:
        assert story.played().name == name


def test_a_story_that_is_not_there_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="seven-failures"):
        load_story("lemon-nod")
