"""Topics of help name commands and pages that are there."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from phalanx.cli.app import COMMANDS
from phalanx.cli.operate.help import app, help_topics

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", help_topics())
def test_a_topic_names_commands_and_a_page_that_are_there(name: str) -> None:
    topic = help_topics()[name]
    assert {command.split()[1] for command, _ in topic.commands} <= set(COMMANDS)
    assert (ROOT / topic.page).exists()
    shown = CliRunner().invoke(app, [name])
    assert shown.exit_code == 0 and topic.page in shown.output
    assert all(command in shown.output for command, _ in topic.commands)


def test_topics_are_listed_and_a_wrong_one_is_refused_with_the_nearest() -> None:
    listed = CliRunner().invoke(app, []).output
    assert all(name in listed for name in help_topics())
    refused = CliRunner().invoke(app, ["failurs"])
    assert refused.exit_code == 2 and "failures" in refused.output + str(refused.stderr)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("tarin", "`phalanx train --help`"),
        ("train", "`phalanx train --help`"),
        ("clusters", "`phalanx help cluster`"),
        ("zzz", "known: start, plan"),
    ],
)
def test_a_word_that_is_no_topic_comes_with_the_topic_or_command_most_like_it(
    word: str, meant: str
) -> None:
    assert meant in CliRunner().invoke(app, [word]).stderr
