"""The generated pages of docs/reference are what the code gives, and explain everything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
import pytest
import typer

import docs.generator.pages as generated
from docs.generator import cli, events, http_api, server, settings
from docs.generator.__main__ import DEMO, PACKED_DEMO
from phalanx.cli.app import COMMANDS, PANELS
from phalanx.cluster.policy import Policy
from phalanx.cluster.protocol.commands import CommandBody
from phalanx.cluster.protocol.events import EventBody
from phalanx.config.tree import paths
from phalanx.control.agent.config import AgentConfig

ROOT = Path(__file__).parents[2]


def test_the_pages_are_what_the_code_gives() -> None:
    assert generated.stale() == [], "run `python -m docs.generator` (or `make docs`)"


def test_the_demo_among_the_examples_is_the_one_that_is_packed() -> None:
    assert not DEMO.is_symlink(), "links are lost where a checkout or an archive has none"
    assert DEMO.read_bytes() == PACKED_DEMO.read_bytes(), "run `python -m docs.generator`"


def test_width_of_the_terminal_and_order_of_hashes_change_nothing() -> None:
    """Whoever regenerates them, on whatever terminal, gets the same bytes."""
    environment = os.environ | {"COLUMNS": "40", "PYTHONHASHSEED": "7", "FORCE_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "docs.generator", "--check"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_stale_page_and_one_that_nothing_generates_are_found_and_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generated, "REFERENCE", tmp_path)
    page = generated.Page("a.md", "A", "About a.", lambda: ["new"])
    monkeypatch.setattr(generated, "declared", lambda: iter([page]))
    (tmp_path / "a.md").write_text("old")
    (tmp_path / "gone.md").write_text(f"{generated.MARK}\n")
    (tmp_path / "by-hand.md").write_text("# Format\n")
    assert generated.stale() == ["a.md", "gone.md"]
    assert generated.write() == ["a.md", "gone.md"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.md", "by-hand.md"]
    assert generated.stale() == []


def test_every_command_and_option_is_there_with_its_meaning() -> None:
    for panel, commands in PANELS.items():
        text = "\n".join(cli.panel(panel))
        for name in commands:
            assert f"## `phalanx {name}`\n" in text
    for name, entry in COMMANDS.items():
        __import__(entry.module)
        command = typer.main.get_command(sys.modules[entry.module].app)
        assert [
            row[0] for each in _with_below(command) for row in cli._rows(each) if not row[3]
        ] == []
        assert name in "\n".join(cli.index())


def _with_below(command: Any) -> Iterator[Any]:
    yield command
    for below in getattr(command, "commands", {}).values():
        yield from _with_below(below)


def test_every_key_of_every_file_is_there_with_its_meaning() -> None:
    assert {doc.key for doc in settings.job_file()} == set(paths_of_job())
    for keys in (
        settings.job_file(),
        settings.struct_keys(Policy),
        settings.struct_keys(AgentConfig),
    ):
        assert [doc.key for doc in keys if not doc.meaning] == []


def paths_of_job() -> tuple[str, ...]:
    from phalanx.config import Job

    return paths(Job)


def test_every_path_and_type_of_the_api_is_there() -> None:
    document = http_api.openapi()
    operations, types = "\n".join(http_api.operations()), "\n".join(http_api.types())
    for path, methods in document["paths"].items():
        for method in methods:
            assert f"### `{method.upper()} {path}`\n" in operations
    for name in document["components"]["schemas"]:
        assert f"## {name}\n" in types


def test_every_event_and_command_is_there_with_its_meaning() -> None:
    text = "\n".join(events.lines())
    bodies = (*get_args(EventBody), *get_args(CommandBody))
    assert [each.__name__ for each in bodies if f"### `{each.__name__}`\n" not in text] == []
    assert [each.__name__ for each in bodies if not each.__doc__] == []


def test_variables_that_find_a_server_are_all_there() -> None:
    source = (ROOT / "phalanx" / "control" / "client" / "client.py").read_text(encoding="utf-8")
    named = set(re.findall(r'"(PHALANX_[A-Z_]+)"', source))
    assert named <= set(server.VARIABLES) and len(named) == 4


class Inner(msgspec.Struct, frozen=True):
    """Keys of a table."""

    wait_ns: int = 90_000_000_000  # before it tries again


class Outer(msgspec.Struct):
    """A file made up for the test."""

    # Said above the field,
    # on two lines.
    share_ppm: int = 20_000
    tables: dict[str, Inner] = {}
    inner: Inner = Inner()


def test_comments_beside_and_above_fields_become_meanings() -> None:
    keys = {doc.key: doc for doc in settings.struct_keys(Outer)}
    assert keys["share_ppm"].meaning == "Said above the field, on two lines."
    assert keys["inner.wait_ns"].meaning == "before it tries again"
    assert keys["tables.NAME.wait_ns"].default == "90000000000"
    assert keys["inner"].meaning == "Keys of a table."


@pytest.mark.parametrize(
    ("key", "default", "shown"),
    [
        ("a_ns", "90000000000", "`90000000000` (90 s)"),
        ("a_ns", "604800000000000", "`604800000000000` (7 days)"),
        ("a_ns", "0", "`0`"),
        ("a_ppm", "20000", "`20000` (2 %)"),
        ("a", "20000", "`20000`"),
        ("a", '"x"', '`"x"`'),
    ],
)
def test_times_and_shares_are_told_in_units_of_people(key: str, default: str, shown: str) -> None:
    assert settings.readable(key, default) == shown


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (int, "integer"),
        (Annotated[float | None, "x"], "number"),
        (list[str], "text"),
        (Literal["a", "b"], "`a`, `b`"),
        (Path | None, "path"),
    ],
)
def test_values_of_options_are_told_in_words(kind: Any, words: str) -> None:
    assert cli.value_of(kind) == words
