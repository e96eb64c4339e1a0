"""Pages of stories: each is played, and its commands are called, so that a page cannot be wrong."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from docs.generator.markdown import table
from phalanx.cli.plan.story import output_of, set_scene
from phalanx.simulate.stories.story_file import IncidentStory, load_story, story_names


def index() -> list[str]:
    """All stories."""
    stories = [load_story(name) for name in story_names()]
    return [
        *table(
            ("story", "what is played"),
            [(f"[{each.title}]({each.name}.md)", _kind(each)) for each in stories],
        ),
        "",
        "```sh",
        "phalanx story                            # list them",
        "phalanx story seven-failures             # play one into ./story-seven-failures",
        "phalanx story seven-failures --reveal    # what it was",
        "phalanx story seven-failures --tell      # all of its page, in the terminal",
        "```",
        "",
        "A simulated story is a controller's log, written by the real core in virtual time from a "
        "scenario and a seed. Every command that reads a server reads such a folder as well, "
        "with `PHALANX_STATE` or `--state`; nothing of it can be changed. Its clock begins on "
        "1 January 1970 UTC (`TZ` has commands show that, wherever you are) and stands where the "
        "recording ends. The scenario, with the text, is one file in `phalanx/simulate/stories/`.",
    ]


def _kind(story: IncidentStory) -> str:
    if not story.scenario:
        return "a real run on this machine"
    scenario = story.played()
    hours = scenario.days * 24
    span = f"{hours:g} hours" if hours < 48 else f"{scenario.days:g} days"
    return f"{scenario.fleet.gpus} GPUs for {span}, simulated, seed {story.seed}"


def page(name: str) -> list[str]:
    """The whole story, with what its commands print."""
    story = load_story(name)
    lines = [
        *story.scene.strip().splitlines(),
        "",
        "```sh",
        f"phalanx story {name}",
        story.enter(story.folder),
        "```",
    ]
    for number, (look, shown) in enumerate(zip(story.looks, outputs(name), strict=True), 1):
        lines += ["", f"## Look {number}", "", look.say.strip(), ""]
        lines += ["```console", f"$ {look.run}", *shown.splitlines(), "```"]
    return [*lines, "", "## What it was", "", *story.reveal.strip().splitlines()]


@cache
def outputs(name: str) -> tuple[str, ...]:
    """What the commands of a story print."""
    story = load_story(name)
    if not story.scenario:
        return tuple(each.shown.strip() for each in story.looks)
    with tempfile.TemporaryDirectory() as folder, _everywhere_alike():
        state = Path(folder) / story.folder
        set_scene(story, state)
        return tuple(output_of(story, each.run, state) for each in story.looks)


@contextmanager
def _everywhere_alike() -> Iterator[None]:
    """Whatever zone and terminal this machine has."""
    before = os.environ.copy()
    os.environ.update(TZ="UTC", COLUMNS="240", NO_COLOR="1", TERM="dumb")
    os.environ.pop("FORCE_COLOR", None)
    time.tzset()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        time.tzset()
