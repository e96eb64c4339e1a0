"""What all ranks do together: they agree, and succeed or fail as one."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from phalanx.checkpoint.format.describe import current_rank, world_size
from phalanx.checkpoint.format.folder import older_than
from phalanx.checkpoint.format.manifest import (
    BadCheckpointError,
    CheckpointError,
    KeeperLostError,
    LostPlaceError,
)

PROBLEMS_SHOWN = 8

log = logging.getLogger(__name__)
T = TypeVar("T")


class Ranks:
    """All ranks of the job; one alone where there is no process group."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None

    @contextmanager
    def together(self, path: Path | str) -> Iterator[None]:
        """Work that succeeds on every rank, or ends in the same CheckpointError on every rank."""
        failure: CheckpointError | None = None
        try:
            yield
        except CheckpointError as error:
            failure = error
        except Exception as error:  # whatever it is, the other ranks must learn of it
            log.debug("checkpoint %s failed on rank %d", path, current_rank(), exc_info=True)
            number = error.errno or 0 if isinstance(error, OSError) else 0
            words = f"rank {current_rank()}: {described(error)}"
            failure = CheckpointError(path, words, errno=number)
        failures = [each for each in self.gather(failure) if each is not None]
        if failures:
            raise merged(path, failures)

    def gather(self, value: T) -> list[T]:
        if not dist.is_initialized():
            return [value]
        values = [value] * world_size()
        dist.all_gather_object(values, value, group=self.cpu_group())
        return values

    def agreed(self, value: T) -> T:
        """Rank 0's value."""
        return self.gather(value)[0]

    def any_of(self, value: bool) -> bool:
        """Whether it is so on some rank; one small reduction, cheap enough for every step."""
        if world_size() == 1:
            return value
        total = torch.tensor([float(value)])
        dist.all_reduce(total, group=self.cpu_group())
        return bool(total.item() > 0)

    def cpu_group(self) -> dist.ProcessGroup | None:
        """A gloo group of all ranks: agreement must not depend on the health of a GPU."""
        if not dist.is_initialized() or dist.get_backend() == "gloo":
            return None
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        return self._group


def merged(path: Path | str, errors: list[CheckpointError]) -> CheckpointError:
    """One error for all ranks, each problem once, in rank order."""
    problems = list(dict.fromkeys(problem for error in errors for problem in error.problems))
    # One rank that cannot write is not to be taken for bytes that are wrong.
    bad = all(isinstance(error, BadCheckpointError) for error in errors)
    hidden = len(problems) - PROBLEMS_SHOWN if bad else 0  # a lost disk makes thousands
    shown = [*problems[:PROBLEMS_SHOWN], f"and {hidden} more"] if hidden > 0 else problems
    fix = errors[0].fix
    if bad and not fix:
        older = older_than(path) if isinstance(path, Path) else None
        fix = f"load the older {older}" if older else "there is no older checkpoint beside it"
    error_type: type[CheckpointError] = BadCheckpointError if bad else CheckpointError
    for special in (KeeperLostError, LostPlaceError):
        if any(isinstance(error, special) for error in errors):
            error_type = special
    number = _telling([error.errno for error in errors if error.errno])
    ranks = sorted({rank for error in errors for rank in error.ranks})
    return error_type(path, shown, fix, number, tuple(ranks))


def _telling(numbers: list[int]) -> int:
    """The operating system's number that says most: whoever fails takes what it wrote away, with
    the folder, which the others miss then.
    """
    return next((number for number in numbers if number != errno.ENOENT), sum(numbers[:1]))


def described(error: BaseException) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
