"""Which exit a failure means, the reason in words, and what to do next."""

from __future__ import annotations

import re
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.checkpoint.manifest import CheckpointError
from phalanx.config import ConfigError
from phalanx.data import DataExhausted
from phalanx.model.hf_config import HfError
from phalanx.train.exits import DeviceMemoryError, ExitCode, ExitInfo, NonFiniteLoss, now

# Backends report a dead or silent peer in prose only.
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)( by)?( peer| remote)?|broken pipe|socket timeout"
    r"|timed out (waiting|after)|wait timeout|watchdog caught collective|nccl (error|communicator)"
    r"|remote process exited|gloo/transport|heartbeat monitor",
    re.IGNORECASE,
)
_NO_HOST_MEMORY = re.compile(r"DefaultCPUAllocator: |cannot allocate memory", re.IGNORECASE)
_DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded|File too large")


def classify(error: BaseException, rank: int | None = None, step: int | None = None) -> ExitInfo:
    """The exit that an exception means, with advice for the person who reads it."""
    code, reason, advice = _diagnose(error)
    details: dict[str, int | float | str] = {"error": type(error).__name__}
    if isinstance(error, DeviceMemoryError):
        details |= error.breakdown
    if isinstance(error, CheckpointError):
        details["path"] = str(error.path)
    message = str(error) or type(error).__name__
    if isinstance(error, CheckpointError):  # the fix is the advice
        message = str(CheckpointError(error.path, error.problems))
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


def killed(rank: int, signal_name: str, log_tail: str, evidence: str) -> ExitInfo:
    """The exit of a rank that a signal ended before it could report.

    ``evidence`` is what the kernel says about a lack of memory; "" when it says nothing.
    """
    message = f"was killed by {signal_name}"
    if signal_name == "SIGKILL" and evidence:
        code, reason, advice = ExitCode.HOST_MEMORY, "host_memory", HOST_MEMORY_ADVICE
        message += f" because host memory ran out ({evidence})"
    elif signal_name == "SIGKILL":
        code, reason, advice = ExitCode.LOST_PEER, "rank_killed", _KILLED_ADVICE
    elif _LOST_PEER.search(log_tail):  # NCCL's watchdog aborts the process
        code, reason, advice = ExitCode.LOST_PEER, "lost_peer", LOST_PEER_ADVICE
        message += " after a collective failed"
    else:
        code, reason, advice = ExitCode.OTHER, "crash", "The rank's log holds the stack."
    return ExitInfo(
        code=code, reason=reason, message=message, advice=advice, rank=rank, finished=now()
    )


def _diagnose(error: BaseException) -> tuple[ExitCode, str, str]:
    match error:
        case ConfigError() | HfError():
            return ExitCode.CONFIG, "config", "Correct the key named above and start again."
        case DataExhausted():
            advice = "Raise data.epochs (0: no limit), lower train.steps, or add shards."
            return ExitCode.DATA_EXHAUSTED, "data_exhausted", advice
        case NonFiniteLoss():
            return ExitCode.NON_FINITE, "non_finite", _NON_FINITE_ADVICE
        case DeviceMemoryError():
            return ExitCode.GPU_MEMORY, "gpu_memory", error.advice
        case torch.OutOfMemoryError():
            return ExitCode.GPU_MEMORY, "gpu_memory", _GPU_MEMORY_ADVICE
        case CheckpointError():
            return ExitCode.CHECKPOINT, "checkpoint", _checkpoint_advice(error)
        case KeyboardInterrupt():
            return ExitCode.INTERRUPTED, "interrupted", "Nothing was saved after the last step."
    return _diagnose_foreign(error)


def _diagnose_foreign(error: BaseException) -> tuple[ExitCode, str, str]:
    # The pipeline's schedules wrap whatever fails in a stage, a lost peer too.
    if (cause := error.__cause__ or error.__context__) is not None:
        found = _diagnose_foreign(cause)
        if found[0] != ExitCode.OTHER:
            return found
    text = str(error)
    if isinstance(error, MemoryError) or _NO_HOST_MEMORY.search(text):
        return ExitCode.HOST_MEMORY, "host_memory", HOST_MEMORY_ADVICE
    if isinstance(error, ConnectionError | dist.DistError) or (
        isinstance(error, RuntimeError) and _LOST_PEER.search(text)
    ):
        return ExitCode.LOST_PEER, "lost_peer", LOST_PEER_ADVICE
    return ExitCode.OTHER, "error", "The rank's log holds the traceback."


def disk_is_full(message: str) -> bool:
    """Whether a checkpoint failed for lack of room."""
    return _DISK_FULL.search(message) is not None


def _checkpoint_advice(error: CheckpointError) -> str:
    if disk_is_full(str(error)):
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
LOST_PEER_ADVICE = (
    "Another rank or the network between ranks failed; the other ranks' logs say which. "
    'Continue from the last checkpoint with checkpoint.resume = "auto". If the ranks were only '
    "slow, raise train.collective_timeout_seconds."
)
_NON_FINITE_ADVICE = (
    "Lower optimizer.learning_rate, lengthen schedule.warmup_steps, or resume from an earlier "
    "checkpoint; train.max_non_finite is how many such steps are tolerated."
)
