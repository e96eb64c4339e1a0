"""The registry: commands that exist, figures that can be judged, a quick part that is quick."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path

import pytest

from proof.claims import CLAIMS

QUICK_MINUTES = 8


@pytest.mark.parametrize("name", CLAIMS)
def test_the_command_of_a_claim_exists(name: str) -> None:
    words = shlex.split(CLAIMS[name].command)
    if "-m" in words:
        assert importlib.util.find_spec(words[words.index("-m") + 1]) is not None
    else:
        assert Path(words[1]).exists()


def test_figures_have_names_of_their_own_and_one_bar_each() -> None:
    for claim in CLAIMS.values():
        names = [figure.name for figure in claim.figures]
        assert len(set(names)) == len(names), claim.name
        assert not any(f.at_most is not None and f.at_least is not None for f in claim.figures)
        assert any(f.bar for f in claim.figures), f"{claim.name} cannot fail"


def test_the_quick_part_is_quick() -> None:
    assert 0 < sum(claim.minutes for claim in CLAIMS.values() if claim.quick) <= QUICK_MINUTES
