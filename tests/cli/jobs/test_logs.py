"""Lines of a log that match, however it arrives."""

from __future__ import annotations

import re

import pytest

from phalanx.cli.jobs.logs import matching

LOG = b"step 1 loss 8\nwarning: slow\nstep 2 loss 7\nlast loss"


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_matching_lines_are_whole_wherever_pieces_end(size: int) -> None:
    pieces = [LOG[at : at + size] for at in range(0, len(LOG), size)]
    found = b"".join(matching(pieces, re.compile(b"loss")))
    assert found == b"step 1 loss 8\nstep 2 loss 7\nlast loss\n"
    assert b"".join(matching(pieces, None)) == LOG
