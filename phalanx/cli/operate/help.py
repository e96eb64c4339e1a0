"""``phalanx help TOPIC``: the commands for what one wants to do, and the page that says more."""

from __future__ import annotations

import tomllib
from importlib import resources
from typing import Annotated

import msgspec
import typer
from msgspec import Struct

from phalanx.cli.options import Json
from phalanx.cli.output import exit_on_config_error, print_json
from phalanx.config.errors import ConfigError, did_you_mean, near

app = typer.Typer()


class HelpTopic(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What somebody wants, the commands for it in order, and where more is written."""

    about: str
    commands: tuple[tuple[str, str], ...]
    page: str


def help_topics() -> dict[str, HelpTopic]:
    """Every topic by its name."""
    text = resources.files(__package__).joinpath("help_topics.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, HelpTopic])


@app.command()
def help(
    topic: Annotated[
        str, typer.Argument(metavar="[TOPIC]", help="What it is about (default: list the topics).")
    ] = "",
    json: Json = False,
) -> None:
    """List the commands for a topic: failures, queue, data, plan, …"""
    topics = help_topics()
    if topic and topic not in topics:
        with exit_on_config_error(json):
            raise ConfigError("topic", topic, "no such topic", _instead(topic, list(topics)))
    if json:
        print_json({topic: topics[topic]} if topic else topics)
    elif topic:
        print("\n".join(_lines(topics[topic])))
    else:
        for name, each in topics.items():
            print(f"{name:<12} {each.about}")
        print("\nphalanx help TOPIC; phalanx COMMAND --help")


def _instead(word: str, topics: list[str]) -> str:
    """The topic or command that is called most like this."""
    from phalanx.cli.app import COMMANDS

    if name := near(word, [*topics, *COMMANDS]):
        shown = f"phalanx help {name}" if name in topics else f"phalanx {name} --help"
        return f"did you mean `{shown}`?"
    return did_you_mean(word, topics)


def _lines(topic: HelpTopic) -> list[str]:
    width = max(len(command) for command, _ in topic.commands)
    return [
        f"{topic.about}\n",
        *(f"  {command:<{width}}  {why}" for command, why in topic.commands),
        f"\nmore: {topic.page}",
    ]
