"""The ranks that tests run say how they ended."""

from __future__ import annotations

import os
import signal

import pytest
import torch.distributed as dist

from tests.ranks import RankError, run_ranks


def test_a_rank_that_a_signal_ended_says_which() -> None:
    def second_is_killed() -> int:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)  # quiet, unlike an abort
        return dist.get_rank()

    def second_leaves() -> None:
        if dist.get_rank() == 1:
            os._exit(3)

    with pytest.raises(RankError, match="rank 1:\nended by SIGUSR1"):
        run_ranks(2, second_is_killed)
    with pytest.raises(RankError, match="rank 1:\nended with exit code 3"):
        run_ranks(2, second_leaves)
