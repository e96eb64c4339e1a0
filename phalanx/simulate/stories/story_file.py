"""A story is a file: text, commands to look with, and what is played (a scenario and a seed)."""

from __future__ import annotations

import tomllib
from importlib import resources
from typing import Any

import msgspec
from msgspec import Struct

from phalanx.config.errors import ConfigError, did_you_mean
from phalanx.simulate.scenario.load import scenario_of
from phalanx.simulate.scenario.scenario import Scenario


class Look(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command, and what a reader should see in what it prints."""

    run: str
    say: str
    shown: str = ""  # what it prints, where the scene is a real run and not a simulated one


CLOCK = "UTC"  # of times in stories, wherever their reader is


class IncidentStory(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One incident. It is simulated (``scenario``, ``seed``), or a real run (``setup``)."""

    name: str
    title: str
    scene: str
    looks: tuple[Look, ...]
    reveal: str
    scenario: dict[str, Any] = {}
    seed: int = 0
    clues: tuple[str, ...] = ()  # words that what the commands print must have
    setup: tuple[str, ...] = ()  # commands for a shell, in the folder of the story

    @property
    def folder(self) -> str:
        """Where it is played, below the current folder."""
        return f"story-{self.name}"

    def enter(self, folder: str) -> str:
        """What a reader types to look at the scene in that folder."""
        return f"export PHALANX_STATE={folder} TZ={CLOCK}" if self.scenario else f"cd {folder}"

    def played(self) -> Scenario:
        """What is simulated."""
        return scenario_of({"name": self.name, "about": self.title, **self.scenario})


def story_names() -> list[str]:
    """The stories that come with Phalanx."""
    names = (entry.name for entry in resources.files(__package__).iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def load_story(name: str) -> IncidentStory:
    """A story by its name."""
    known = story_names()
    if name not in known:
        raise ConfigError("story", name, "no such story", did_you_mean(name, known))
    text = resources.files(__package__).joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return msgspec.convert({"name": name, **tomllib.loads(text)}, IncidentStory)
