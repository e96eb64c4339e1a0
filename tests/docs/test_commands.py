"""Commands that pages show exist, with the options that they are given."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from phalanx.cli.app import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(?:sh|console|)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def shown(text: str) -> Iterator[list[str]]:
    """Words of every call of ``phalanx`` in a page's blocks for the shell."""
    for block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            for call in re.split(r"\||;|&&", line.removeprefix("$ ")):
                before, found, words = f" {call}".partition(" phalanx ")
                if found and re.fullmatch(r"(\s*\w+=\S+)*\s*", before):
                    yield split(words)


def split(words: str) -> list[str]:
    """As a shell does; a call that a pipe or semicolon inside quotes cut is split at blanks."""
    try:
        return shlex.split(words, comments=True)
    except ValueError:
        return words.split()


@cache
def command(name: str) -> Any:
    __import__(COMMANDS[name].module)
    return typer.main.get_command(sys.modules[COMMANDS[name].module].app)


def unknown(words: list[str]) -> list[str]:
    """What of a call the command line does not know."""
    if not words or words[0].startswith(("-", "[")) or not re.fullmatch(r"[a-z0-9-]+", words[0]):
        return []
    if words[0] not in COMMANDS:
        return [words[0]]
    here, options = command(words[0]), {"--help"}
    wrong = []
    for word in words[1:]:
        if word == "--":
            break
        below = getattr(here, "commands", {})
        options |= {name for each in here.params for name in (*each.opts, *each.secondary_opts)}
        if word in below:
            here = below[word]
        elif re.fullmatch(r"--[a-z][a-z-]*(=.*)?", word):
            options |= {name for each in here.params for name in (*each.opts, *each.secondary_opts)}
            if not _known(word.partition("=")[0], here, options):
                wrong.append(word)
    return wrong


def _known(option: str, here: Any, options: set[str]) -> bool:
    """A group that runs a default command takes that one's options."""
    default = getattr(here, "commands", {}).get("run")
    if default is not None:
        options |= {name for each in default.params for name in each.opts}
    return option in options


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_that_is_shown_exists_with_its_options(page: Path) -> None:
    calls = list(shown(page.read_text(encoding="utf-8")))
    assert [(" ".join(call), wrong) for call in calls if (wrong := unknown(call))] == []


def test_commands_are_found_and_mistakes_named() -> None:
    page = (
        "```sh\nA=b phalanx ps --all; phalanx why 1   # look\nnot phalanx ps\n```\n"
        "```console\n$ phalanx plan sweep --modl x \\\n    --gpus 1 | head -1\n```\n"
    )
    calls = list(shown(page))
    assert [call[0] for call in calls] == ["ps", "why", "plan"]
    assert [unknown(call) for call in calls] == [[], [], ["--modl"]]
    assert unknown(["nothing"]) == ["nothing"]
    assert unknown(["submit", "--", "python", "--lr", "1"]) == []


def test_pages_show_many_commands() -> None:
    calls = [call for page in PAGES for call in shown(page.read_text(encoding="utf-8"))]
    assert len(calls) > 100
