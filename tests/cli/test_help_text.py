"""What ``--help`` prints is what was reviewed."""

from __future__ import annotations

import pytest

from docs.generator import help_text


def test_help_of_every_command_is_what_was_reviewed() -> None:
    reviewed = help_text.FILE.read_text(encoding="utf-8").splitlines()
    if help_text.made_with() not in reviewed[0]:
        pytest.skip(f"other libraries lay it out: {help_text.made_with()}; {reviewed[0]}")
    assert help_text.lines() == reviewed, "run `python -m docs.generator`, and read what changed"
