"""What workers are told of a save that failed."""

from __future__ import annotations

from phalanx.checkpoint.format.manifest import CheckpointError
from phalanx.checkpoint.keeper.messages import Failed
from phalanx.checkpoint.write.commit import SaveOrder


def problem_of(error: Exception) -> str:
    """One line for the worker."""
    if isinstance(error, CheckpointError):
        return "; ".join(error.problems)
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def failed(buffer: int, order: SaveOrder, error: Exception) -> Failed:
    """What a worker is told of a save that failed."""
    number = error.errno or 0 if isinstance(error, OSError | CheckpointError) else 0
    return Failed(
        buffer=buffer,
        step=order.draft.step,
        path=order.path,
        problem=problem_of(error),
        fix=fix_of(error),
        errno=number,
    )


def fix_of(error: Exception) -> str:
    """What its author thinks would help."""
    return error.fix if isinstance(error, CheckpointError) else ""
