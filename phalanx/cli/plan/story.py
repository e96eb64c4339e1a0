"""``phalanx story``: an incident to look into, played from its seed, and what it was."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from shlex import split
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.options import Json
from phalanx.cli.output import exit_on_config_error, fail, print_json
from phalanx.control.recording import is_recording

if TYPE_CHECKING:
    from phalanx.simulate.stories.story_file import IncidentStory

app = typer.Typer()

NAMED_NODE = re.compile(r"\bn\d{5}\b")


@app.command()
def story(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="Name of the incident (default: list them).")
    ] = "",
    into: Annotated[
        Path | None, typer.Option(help="Folder to play it into (default: story-NAME here).")
    ] = None,
    reveal: Annotated[bool, typer.Option(help="Print the cause.")] = False,
    tell: Annotated[
        bool,
        typer.Option(
            help="Print the whole walkthrough: every command with its output, and the cause."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Practise diagnosis: simulate an incident, investigate it, then have its cause revealed.

    The scene is simulated through the real core, or is a real run on this machine; the same seed
    gives the same incident everywhere.
    """
    from phalanx.simulate.stories.story_file import load_story

    if not name:
        _list(json)
        return
    with exit_on_config_error(json):
        chosen = load_story(name)
    if reveal and not tell:
        print_json({"reveal": chosen.reveal}) if json else print(chosen.reveal.strip())
        return
    folder = into or Path(chosen.folder)
    set_scene(chosen, folder)
    if json:
        print_json({"story": chosen.name, "folder": str(folder), "looks": chosen.looks})
    elif tell:
        print("\n".join(told(chosen, folder)))
    else:
        print("\n".join(_opening(chosen, folder)))


def _list(json: bool) -> None:
    from phalanx.simulate.stories.story_file import load_story, story_names

    stories = [load_story(name) for name in story_names()]
    if json:
        print_json({each.name: each.title for each in stories})
        return
    for each in stories:
        print(f"{each.name:<18} {each.title}")
    print("\nphalanx story NAME plays one; phalanx story NAME --reveal says what it was")


def set_scene(story: IncidentStory, folder: Path) -> None:
    """Play the story into a folder, unless it was already."""
    from phalanx.control.recording.write import record

    done = folder / "story.done"
    if is_recording(folder) or done.exists():
        return
    if folder.exists() and any(folder.iterdir()):
        fail(f"{folder} is there and is not this story: remove it, or name another with --into", 2)
    if story.scenario:
        record(story.played(), story.seed, folder)
        return
    folder.mkdir(parents=True, exist_ok=True)
    for number, command in enumerate(story.setup, 1):
        about = f"[{number}/{len(story.setup)}] {heading(command)}"
        print(about, file=sys.stderr, flush=True)
        ended = subprocess.run(_called(command), shell=True, cwd=folder, check=False)
        if ended.returncode:
            fail(f"the scene cannot be set: {command} ended with {ended.returncode}")
    done.touch()


def heading(command: str) -> str:
    """A command of a scene as it is announced: scripts that it writes would tell the cause."""
    first, *more = command.strip().splitlines()
    return f"{first} …" if more else first


def _opening(story: IncidentStory, folder: Path) -> list[str]:
    """The scene, and commands to begin with: whom to look at the reader finds out."""
    return [
        f"{story.title}\n",
        story.scene.strip(),
        f"\nLook for yourself:\n\n    {story.enter(str(folder))}",
        *(f"    {NAMED_NODE.sub('NODE', each.run)}" for each in story.looks),
        f"\nWhen you know: phalanx story {story.name} --reveal",
    ]


def told(story: IncidentStory, folder: Path) -> list[str]:
    """The whole story, as lines."""
    lines = [f"{story.title}\n", story.scene.strip()]
    for each in story.looks:
        lines += ["", each.say.strip(), "", f"$ {each.run}", output_of(story, each.run, folder)]
    return [*lines, "", story.reveal.strip()]


def output_of(story: IncidentStory, command: str, folder: Path) -> str:
    """What a command of a story prints."""
    if not story.scenario:
        done = subprocess.run(
            _called(command), shell=True, cwd=folder, capture_output=True, text=True, check=False
        )
        return (done.stdout + done.stderr).rstrip()
    from phalanx.cli.app import app as root

    printed = StringIO()
    with _looking_at(folder), redirect_stdout(printed):
        root(split(command)[1:], standalone_mode=False)
    return "\n".join(line.rstrip() for line in printed.getvalue().rstrip().splitlines())


@contextmanager
def _looking_at(folder: Path) -> Iterator[None]:
    from phalanx.simulate.stories.story_file import CLOCK

    before = os.environ.copy()
    os.environ.pop("PHALANX_SERVER", None)
    os.environ |= {"PHALANX_STATE": str(folder), "TZ": CLOCK}
    time.tzset()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        time.tzset()


def _called(command: str) -> str:
    """With this Phalanx, whatever a shell would find."""
    program = f"{sys.executable} -m phalanx"
    return f"{program}{command.removeprefix('phalanx')}" if _is_ours(command) else command


def _is_ours(command: str) -> bool:
    return command.startswith("phalanx ")
