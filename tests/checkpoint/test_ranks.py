"""One error for all ranks."""

from __future__ import annotations

import errno

import pytest

from phalanx.checkpoint.format.manifest import CheckpointError
from phalanx.checkpoint.ranks import merged


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((errno.ENOENT, errno.EFBIG), errno.EFBIG),  # the folder went with the one that failed
        ((errno.ENOSPC, errno.ENOENT), errno.ENOSPC),
        ((errno.ENOENT, 0), errno.ENOENT),
        ((0, 0), 0),
    ],
)
def test_the_reason_is_said_and_not_what_followed_from_it(
    numbers: tuple[int, ...], said: int
) -> None:
    errors = [CheckpointError("x", f"rank {r}", errno=n) for r, n in enumerate(numbers)]
    together = merged("x", errors)
    assert together.errno == said and together.problems == ["rank 0", "rank 1"]
