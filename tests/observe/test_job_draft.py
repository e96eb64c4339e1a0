"""Mistakes in a job file that somebody writes, each with the line that it stands on."""

from __future__ import annotations

import pytest

from phalanx.control.server.api.drafts import DraftIn, command_of
from phalanx.observe.job_draft import drafted, key_lines

GOOD = """name = "x"
[model]
preset = "tiny"
[data]
source = "synthetic"
[train]
steps = 5
device = "cpu"
"""


def lines(text: str, *settings: str) -> list[tuple[int, str]]:
    return [(each.line, each.key) for each in drafted(text, settings, 0, 8).problems]


def test_a_text_without_mistakes_is_the_job_on_its_ranks() -> None:
    found = drafted(GOOD + "[parallel]\ndata = 4\n", ["train.steps=7"], 0, 8)
    assert found.problems == () and found.job is not None
    assert (found.ranks, found.job.train.steps) == (4, 7)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD.replace("steps", "stepz"), [(7, "train.stepz")]),
        (GOOD.replace("5", '"many"'), [(7, "train.steps")]),
        (
            GOOD.replace("[train]\nsteps", "[train]\n# five\n\nsteps").replace("5", "0"),
            [(9, "train.steps")],
        ),
        (GOOD + "train.micro_batch = 0\n", [(9, "train.train")]),
        (GOOD.replace("tiny", "tinny"), [(3, "model.preset")]),
        (
            GOOD + 'checkpoint.x = """\na\n"""\nnew = 1\n',
            [(9, "train.checkpoint"), (12, "train.new")],
        ),
        ("name = \n", [(1, "TOML")]),
        ("name = 'x'\n[a\n", [(2, "TOML")]),
        ('a = """\n', [(2, "TOML")]),
    ],
)
def test_a_mistake_has_the_line_of_its_key(text: str, expected: list[tuple[int, str]]) -> None:
    assert lines(text) == expected


def test_a_mistake_of_an_override_is_of_no_line() -> None:
    assert lines(GOOD, "train.steps=0") == [(0, "train.steps")]


def test_keys_in_quotes_dots_and_tables_of_tables_are_found() -> None:
    text = '[[optimizer.groups]]\nmatch = "a"\n["b c".d]\n e . f=1\n'
    found = key_lines(text)
    assert found["optimizer.groups"] == 1 and found["optimizer.groups.match"] == 2
    assert found["b c.d.e.f"] == 4 and found["b c.d.e"] == 4


def test_the_command_does_the_same_and_quotes_what_a_shell_would_read() -> None:
    asked = DraftIn(
        toml="", settings=("data.path=a b",), gpus=16, folder="/x y", minutes=2.5, held=True
    )
    assert command_of(asked) == (
        "phalanx submit job.toml --world-size 16 --set 'data.path=a b' --workdir '/x y' "
        "--minutes 2.5 --hold"
    )
