"""Which exit a failure means, the reason in words, and what to do next."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.checkpoint.format.manifest import CheckpointError, KeeperLostError
from phalanx.config import ConfigError
from phalanx.data import DataExhausted
from phalanx.model.hf.files import HfError
from phalanx.train.exits import DeviceMemoryError, EndReason, ExitCode, ExitInfo, NonFiniteLoss, now

# Backends report a dead or silent peer in prose only.
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)( by)?( peer| remote)?|broken pipe|socket timeout"
    r"|timed out (waiting|after)|wait timeout|watchdog caught collective|nccl (error|communicator)"
    r"|remote process exited|gloo/transport|heartbeat monitor",
    re.IGNORECASE,
)
_NO_HOST_MEMORY = re.compile(r"DefaultCPUAllocator: |cannot allocate memory", re.IGNORECASE)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# A disk, a mount or a file server fails, whoever asked for what.
_STORAGE = (
    errno.EIO,
    errno.EROFS,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.EHOSTDOWN,
    errno.EREMOTEIO,
    errno.ENODEV,
    errno.ENXIO,
)
# In a folder of our own these mean that it is away, not that somebody named it wrongly.
_AWAY = (errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EACCES, errno.EPERM)


def classify(
    error: BaseException,
    rank: int | None = None,
    step: int | None = None,
    own: Sequence[Path] = (),
) -> ExitInfo:
    """The exit that an exception means, with advice for the person who reads it.

    ``own``: folders that were there when the run began; what is missing in them is away.
    """
    code, reason, advice = _diagnose(error, own)
    details: dict[str, int | float | str] = {"error": type(error).__name__}
    if isinstance(error, DeviceMemoryError):
        details |= error.breakdown
    if isinstance(error, CheckpointError):
        details["path"] = str(error.path)
    message = str(error) or type(error).__name__
    if isinstance(error, CheckpointError):  # the fix is the advice
        message = str(CheckpointError(error.path, error.problems))
    elif not isinstance(error, NonFiniteLoss | DataExhausted) and (notes := _notes(error)):
        message = f"{message} ({notes})"
    return ExitInfo(
        code=code,
        reason=reason,
        message=message,
        advice=advice,
        rank=rank,
        step=step,
        details=details,
        finished=now(),
    )


def _notes(error: BaseException) -> str:
    """What was noted on the error's way, as the callback that it comes from."""
    return ", ".join(getattr(error, "__notes__", ()))


def killed(rank: int, signal_name: str, log_tail: str, evidence: str) -> ExitInfo:
    """The exit of a rank that a signal ended before it could report.

    ``evidence`` is what the kernel says about a lack of memory; "" when it says nothing.
    """
    message = f"was killed by {signal_name}"
    if signal_name == "SIGKILL" and evidence:
        code, reason, advice = ExitCode.HOST_MEMORY, EndReason.HOST_MEMORY, HOST_MEMORY_ADVICE
        message += f" because host memory ran out ({evidence})"
    elif signal_name == "SIGKILL":
        code, reason, advice = ExitCode.LOST_PEER, EndReason.RANK_KILLED, _KILLED_ADVICE
    elif _LOST_PEER.search(log_tail):  # NCCL's watchdog aborts the process
        code, reason, advice = ExitCode.LOST_PEER, EndReason.LOST_PEER, LOST_PEER_ADVICE
        message += " after a collective failed"
    elif signal_name == "SIGBUS":
        code, reason, advice = ExitCode.OTHER, EndReason.BUS_ERROR, _BUS_ERROR_ADVICE
        message += ": a file or memory that is mapped could not be read or written"
    else:
        code, reason, advice = ExitCode.OTHER, EndReason.CRASH, "The rank's log holds the stack."
    return ExitInfo(
        code=code, reason=reason, message=message, advice=advice, rank=rank, finished=now()
    )


def _diagnose(error: BaseException, own: Sequence[Path]) -> tuple[ExitCode, EndReason, str]:
    match error:
        case ConfigError() | HfError():
            return ExitCode.CONFIG, EndReason.CONFIG, "Correct the key named above and start again."
        case DataExhausted():
            advice = "Raise data.epochs (0: no limit), lower train.steps, or add shards."
            return ExitCode.DATA_EXHAUSTED, EndReason.DATA_EXHAUSTED, advice
        case NonFiniteLoss():
            return ExitCode.NON_FINITE, EndReason.NON_FINITE, _NON_FINITE_ADVICE
        case DeviceMemoryError():
            return ExitCode.GPU_MEMORY, EndReason.GPU_MEMORY, error.advice
        case torch.OutOfMemoryError():
            return ExitCode.GPU_MEMORY, EndReason.GPU_MEMORY, _GPU_MEMORY_ADVICE
        case KeeperLostError():
            return ExitCode.CHECKPOINT, EndReason.KEEPER_LOST, _checkpoint_advice(error)
        case CheckpointError():
            return _diagnose_checkpoint(error)
        case KeyboardInterrupt():
            return (
                ExitCode.INTERRUPTED,
                EndReason.INTERRUPTED,
                "Nothing was saved after the last step.",
            )
    return _diagnose_storage(error, own) or _diagnose_foreign(error)


def _diagnose_checkpoint(error: CheckpointError) -> tuple[ExitCode, EndReason, str]:
    number = error.errno
    if not number and isinstance(error.__cause__, OSError):
        number = error.__cause__.errno or 0
    if number in _STORAGE:
        return ExitCode.STORAGE, EndReason.STORAGE, storage_advice(str(error.path), number)
    reason = EndReason.DISK_FULL if number in _FULL else EndReason.CHECKPOINT
    return ExitCode.CHECKPOINT, reason, _checkpoint_advice(error, full=number in _FULL)


def _diagnose_storage(
    error: BaseException | None, own: Sequence[Path]
) -> tuple[ExitCode, EndReason, str] | None:
    """Errors of the operating system about storage, which are nobody's in the job."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and not isinstance(error, ConnectionError) and error.errno:
            name = str(error.filename or "")
            away = error.errno in _AWAY and any(_within(name, folder) for folder in own)
            if away or error.errno in (*_STORAGE, *_FULL):
                return ExitCode.STORAGE, EndReason.STORAGE, storage_advice(name, error.errno)
        error = error.__cause__ or error.__context__
    return None


def _within(name: str, folder: Path) -> bool:
    """Whether a path is a folder, in it, or on the way to it."""
    if not name:
        return False
    path = Path(name)
    return path.is_relative_to(folder) or folder.is_relative_to(path)


def storage_advice(path: str, number: int) -> str:
    """Which folder, what the system says of it, and what helps."""
    name = errno.errorcode.get(number, str(number))
    where = path or "a file of the run"
    fixes = {
        errno.EROFS: "mount it writable",
        errno.EACCES: "give the job's user the right to write there",
        errno.EPERM: "give the job's user the right to write there",
        **dict.fromkeys(_FULL, "free space"),
        **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.EEXIST), "bring the folder back"),
    }
    fix = fixes.get(number, "see to its disk, mount or file server")
    return f"{where}: {os.strerror(number)} ({name}). Fix: {fix}."


def _diagnose_foreign(error: BaseException) -> tuple[ExitCode, EndReason, str]:
    # The pipeline's schedules wrap whatever fails in a stage, a lost peer too.
    if (cause := error.__cause__ or error.__context__) is not None:
        found = _diagnose_foreign(cause)
        if found[0] != ExitCode.OTHER:
            return found
    text = str(error)
    if isinstance(error, MemoryError) or _NO_HOST_MEMORY.search(text):
        return ExitCode.HOST_MEMORY, EndReason.HOST_MEMORY, HOST_MEMORY_ADVICE
    if isinstance(error, ConnectionError | dist.DistError) or (
        isinstance(error, RuntimeError) and _LOST_PEER.search(text)
    ):
        return ExitCode.LOST_PEER, EndReason.LOST_PEER, LOST_PEER_ADVICE
    return ExitCode.OTHER, EndReason.ERROR, "The rank's log holds the traceback."


def _checkpoint_advice(error: CheckpointError, *, full: bool = False) -> str:
    if full:
        folder = Path(error.path).parent
        return (
            f"The disk that holds {folder} is full: free space, lower checkpoint.keep, "
            'or set runs to a larger disk; then continue with checkpoint.resume = "auto".'
        )
    return error.fix or "Choose another checkpoint with checkpoint.resume."


HOST_MEMORY_ADVICE = (
    "Host memory ran out: lower data.prefetch or the ranks on this node, "
    'or set memory.offload = "none".'
)
_GPU_MEMORY_ADVICE = (
    'Shard more (parallel.zero = 3, parallel.tensor), set memory.recompute = "full", '
    "or lower data.sequence."
)
_KILLED_ADVICE = (
    "Somebody or something outside the run killed it (an operator, a scheduler, the kernel of "
    'another container). Continue from the last checkpoint with checkpoint.resume = "auto".'
)
_BUS_ERROR_ADVICE = (
    "A shard of the corpus was cut short while it was read, its disk failed, or /dev/shm is full: "
    "the rank's log names the code that wanted it. `phalanx data verify` checks a corpus; then "
    'continue from the last checkpoint with checkpoint.resume = "auto".'
)
LOST_PEER_ADVICE = (
    "Another rank or the network between ranks failed; the other ranks' logs say which. "
    'Continue from the last checkpoint with checkpoint.resume = "auto". If the ranks were only '
    "slow, raise train.collective_timeout_seconds."
)
_NON_FINITE_ADVICE = (
    "Lower optimizer.learning_rate, lengthen schedule.warmup_steps, or resume from an earlier "
    "checkpoint; train.max_non_finite is how many such steps are tolerated."
)
