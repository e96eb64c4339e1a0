"""The ranks that tests run say how they ended."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, run_ranks
from tests.shared_ranks import SharedRanks


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


def _who() -> tuple[int, int, int]:
    total = torch.ones(1)
    dist.all_reduce(total)
    return dist.get_rank(), int(total), os.getpid()


def _second_ends_itself(how: int) -> None:
    if dist.get_rank() == 1:
        if how:
            os.kill(os.getpid(), how)
        raise ValueError("rank one has had enough")
    dist.barrier()


def test_shared_ranks_serve_runs_of_any_size_with_the_same_processes(
    shared_ranks: SharedRanks,
) -> None:
    two, three, one = (shared_ranks.run(size, _who) for size in (2, 3, 1))
    assert [(rank, size) for rank, size, _ in three] == [(0, 3), (1, 3), (2, 3)]
    assert [pid for *_, pid in three][:2] == [pid for *_, pid in two]
    assert one == [(0, 1, three[0][2])]


def test_after_a_failure_shared_ranks_are_new_processes(shared_ranks: SharedRanks) -> None:
    before = [pid for *_, pid in shared_ranks.run(3, _who)]
    with pytest.raises(RankError, match=r"rank 1:\n(.|\n)*rank one has had enough"):
        shared_ranks.run(2, _second_ends_itself, 0)
    between = [pid for *_, pid in shared_ranks.run(2, _who)]
    with pytest.raises(RankError, match="rank 1:\nended without a result"):
        shared_ranks.run(2, _second_ends_itself, signal.SIGKILL)
    after = [pid for *_, pid in shared_ranks.run(2, _who)]
    assert not set(before) & set(between) and not set(between) & set(after)
    assert not any(Path(f"/proc/{pid}").exists() for pid in (*before, *between))
