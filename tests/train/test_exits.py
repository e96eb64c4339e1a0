"""Each way to fail has its own exit code, and the first cause stands."""

from __future__ import annotations

import errno
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from phalanx.checkpoint import CheckpointError
from phalanx.checkpoint.format.manifest import KeeperLostError
from phalanx.checkpoint.ranks import merged
from phalanx.config import ConfigError
from phalanx.data import DataError, DataExhausted
from phalanx.train.exits import (
    DeviceMemoryError,
    ExitCode,
    ExitInfo,
    NonFiniteLoss,
)
from phalanx.train.rank.diagnose import classify, killed
from phalanx.train.report.run_folder import create
from tests.train.forked_runs import small_job

GLOO = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:9"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a.b", 1, "must be 2", "set it to 2"), ExitCode.CONFIG),
        (DataError("data.path", "x", "no corpus there", "make one"), ExitCode.CONFIG),
        (torch.OutOfMemoryError("CUDA out of memory"), ExitCode.GPU_MEMORY),
        (DeviceMemoryError("full", {"parameters": 8}, "lower it"), ExitCode.GPU_MEMORY),
        (MemoryError(), ExitCode.HOST_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), ExitCode.HOST_MEMORY),
        (DataExhausted(10, 8, 1), ExitCode.DATA_EXHAUSTED),
        (NonFiniteLoss(5, 10), ExitCode.NON_FINITE),
        (RuntimeError(GLOO), ExitCode.LOST_PEER),
        (RuntimeError("Timed out waiting 1800000ms for recv operation"), ExitCode.LOST_PEER),
        (dist.DistBackendError("NCCL error: remote process exited"), ExitCode.LOST_PEER),
        (dist.DistNetworkError("The client socket has timed out"), ExitCode.LOST_PEER),
        (ConnectionResetError("reset"), ExitCode.LOST_PEER),
        (CheckpointError(Path("/c/step-1"), "[Errno 28] No space left"), ExitCode.CHECKPOINT),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED),
        (RuntimeError("shape mismatch"), ExitCode.OTHER),
        (ValueError("timed out waiting"), ExitCode.OTHER),
    ],
)
def test_an_exception_means_one_exit_code(error: BaseException, code: ExitCode) -> None:
    info = classify(error, rank=3, step=7)
    assert info.code == code
    assert info.message and info.advice
    assert (info.rank, info.step) == (3, 7)


def test_a_full_disk_under_a_checkpoint_names_the_path_and_the_keys() -> None:
    problem = "[Errno 28] No space left on device: '/c/step-1/x'"
    info = classify(CheckpointError(Path("/c/step-1"), problem, errno=errno.ENOSPC))
    assert info.details["path"] == "/c/step-1"
    assert "/c is full" in info.advice and "checkpoint.keep" in info.advice


@pytest.mark.parametrize(
    ("error", "reason", "words"),
    [
        (OSError(errno.EIO, "x", "/data/shard-3"), "storage", "/data/shard-3: Input/output error"),
        (OSError(errno.EROFS, "x", "/r/run/config"), "storage", "mount it writable"),
        (OSError(errno.ESTALE, "x"), "storage", "Stale file handle (ESTALE)"),
        (TimeoutError(errno.ETIMEDOUT, "x", "/r/run"), "storage", "ETIMEDOUT"),
        (OSError(errno.ENOSPC, "x", "/r/run/logs"), "storage", "free space"),
        (FileNotFoundError(errno.ENOENT, "x", "/r/run"), "storage", "bring the folder back"),
        (FileExistsError(errno.EEXIST, "x", "/r"), "storage", "bring the folder back"),
        (FileNotFoundError(errno.ENOENT, "x", "/elsewhere"), "error", "traceback"),
        (CheckpointError("/r/step-1", "cannot", errno=errno.EIO), "storage", "/r/step-1"),
        (KeeperLostError("/r", "gone"), "keeper_lost", ""),
        (TimeoutError("a lock"), "error", ""),
    ],
)
def test_errors_of_the_storage_are_told_from_the_jobs_own(
    error: BaseException, reason: str, words: str
) -> None:
    info = classify(error, own=[Path("/r/run")])
    assert info.reason == reason and words in info.advice
    wrapped = RuntimeError("a stage failed")
    wrapped.__cause__ = error
    if isinstance(error, OSError):
        assert classify(wrapped, own=[Path("/r/run")]).reason == reason


def test_what_one_rank_lost_all_ranks_report() -> None:
    lost = pickle.loads(pickle.dumps(KeeperLostError(Path("/c"), "gone")))
    full = pickle.loads(pickle.dumps(CheckpointError(Path("/c"), "no room", errno=errno.ENOSPC)))
    assert classify(merged(Path("/c"), [lost])).reason == "keeper_lost"
    assert classify(merged(Path("/c"), [full])).reason == "disk_full"


def test_device_memory_is_reported_by_purpose() -> None:
    info = classify(DeviceMemoryError("full", {"parameters": 8, "optimizer": 16}, "zero = 3"))
    assert (info.details["parameters"], info.details["optimizer"]) == (8, 16)
    assert info.advice == "zero = 3"


def test_the_non_finite_exit_names_the_first_bad_step() -> None:
    assert "step 5" in classify(NonFiniteLoss(5, 10)).message


@pytest.mark.parametrize(
    ("signal_name", "tail", "evidence", "code"),
    [
        ("SIGKILL", "", "oom_kill rose", ExitCode.HOST_MEMORY),
        ("SIGKILL", "", "", ExitCode.LOST_PEER),
        ("SIGABRT", "Watchdog caught collective operation timeout", "", ExitCode.LOST_PEER),
        ("SIGSEGV", "Fatal Python error", "", ExitCode.OTHER),
    ],
)
def test_a_killed_rank_is_told_apart_by_what_is_known(
    signal_name: str, tail: str, evidence: str, code: ExitCode
) -> None:
    info = killed(2, signal_name, tail, evidence)
    assert (info.code, info.rank) == (code, 2)
    assert signal_name in info.message


def test_a_corpus_that_is_cut_while_it_is_read_is_named_beside_what_else_it_may_be() -> None:
    """The kernel says no more than that a page of a mapping cannot be had."""
    info = killed(0, "SIGBUS", "Fatal Python error: Bus error", "")
    assert (info.code, info.reason) == (ExitCode.OTHER, "bus_error")
    assert "corpus was cut short" in info.advice and "/dev/shm is full" in info.advice


def _info(code: ExitCode, reason: str, rank: int) -> ExitInfo:
    return ExitInfo(code=code, reason=reason, message="", rank=rank)


def test_the_first_failure_stands(tmp_path: Path) -> None:
    folder = create(small_job(tmp_path))
    first = _info(ExitCode.GPU_MEMORY, "gpu_memory", 1)
    assert folder.write_exit(first) == first
    assert folder.write_exit(_info(ExitCode.OTHER, "error", 2)) == first
    assert folder.write_exit(_info(ExitCode.LOST_PEER, "lost_peer", 3)) == first
    assert folder.read_exit() == first


def test_a_cause_takes_the_place_of_its_symptom(tmp_path: Path) -> None:
    folder = create(small_job(tmp_path))
    folder.write_exit(_info(ExitCode.LOST_PEER, "lost_peer", 0))
    cause = _info(ExitCode.HOST_MEMORY, "host_memory", 2)
    assert folder.write_exit(cause) == cause
    assert folder.read_exit() == cause


def test_an_exit_report_leaves_no_draft_behind(tmp_path: Path) -> None:
    folder = create(small_job(tmp_path))
    folder.write_exit(_info(ExitCode.DONE, "done", 0))
    assert {path.name for path in folder.path.iterdir()} == {
        "config", "logs", "metrics", "checkpoints", "provenance", "exit_info.json",
    }  # fmt: skip
