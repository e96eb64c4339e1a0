"""Programs of other libraries, as their users start them, and what shows that one went on."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from msgspec import Struct

from phalanx.data.tokenize.vocabulary import train_tokenizer
from phalanx.testing.engine_job import NUMBER, EngineJob
from phalanx.testing.local_processes import worker_pids

SCRIPTS = Path(__file__).parent / "frameworks"
SILENT_SECONDS = int(os.environ.get("PHALANX_SILENT_SECONDS", "600"))  # less: a trial of the trial
# It says nothing and does nothing for a while, and begins where it was.
SILENT = (
    "echo begins after $(cat at); echo 1 > at; touch reached; "
    "while [ -e kill-me ]; do sleep 1; done; sleep {}; echo ends"
)
PYTHON = (sys.executable,)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
MPI = ("mpirun", "--oversubscribe", sys.executable)
# The debug model, with its own checkpoints, on text and a tokenizer that are here.
TITAN = (
    *(sys.executable, "-m", "torchtitan.train", "--experimental.custom_import", "titan_on_cpu"),
    *("--model.name", "llama3", "--model.flavor", "debugmodel", "--model.hf_assets_path", "titan"),
    *(
        "--training.dataset_path",
        "titan/text",
        "--training.seq_len",
        "128",
        "--training.steps",
        "20",
    ),
    *("--training.local_batch_size", "1", "--metrics.log_freq", "1", "--comm.trace_buf_size", "0"),
    *("--checkpoint.enable", "--checkpoint.interval", "5"),
)


class Program(Struct, frozen=True):
    """A command on two ranks, or one; what it prints when it goes on, and at its end."""

    command: tuple[str, ...]
    resumed: str
    ended: str = "ends at step 20"
    ranks: int = 2
    one_node: bool = False  # its launcher cannot reach others


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skipped where one of them is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    words = f"{', '.join(missing)} not installed: pip install 'phalanx[frameworks]'"
    return pytest.mark.skipif(bool(missing), reason=words)


NEEDS_MPI = pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")

# Each brings its own checkpoints.
LIBRARIES = [
    pytest.param(
        Program((*PYTHON, "hf_trainer.py"), "begins after hf/checkpoint-10"),
        id="transformers",
        marks=needs("transformers", "accelerate"),
    ),
    pytest.param(
        Program((*PYTHON, "lightning_fit.py"), "begins after lightning/last.ckpt"),
        id="lightning",
        marks=needs("lightning"),
    ),
    pytest.param(
        Program((*PYTHON, "accelerate_loop.py"), "begins after step 10 with 2 ranks"),
        id="accelerate",
        marks=needs("accelerate"),
    ),
    pytest.param(
        Program((*MPI, "mpi_hello.py"), "begins after step 10", one_node=True),
        id="mpi",
        marks=NEEDS_MPI,
    ),
    pytest.param(
        Program(TITAN, "Training starts at step 11", "Training completed"),
        id="torchtitan",
        marks=needs("torchtitan", "triton"),  # it imports kernels that a CPU does not use
    ),
]
PLAIN = [
    pytest.param(Program((*PYTHON, "plain_ddp.py"), "begins after step 10"), id="ddp"),
    pytest.param(Program((*TORCHRUN, "plain_ddp.py"), "begins after step 10"), id="torchrun"),
]
SHELL = pytest.param(
    Program(("sh", "-c", SILENT.format(SILENT_SECONDS)), "begins after 1", "ends", ranks=1),
    id="silent",
)
# Some of them refuse root, or would ask servers that are not there.
VARIABLES = (
    *("--env", "OMPI_ALLOW_RUN_AS_ROOT=1", "--env", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"),
    *("--env", "HF_HUB_OFFLINE=1", "--env", "HF_HOME=cache"),
)


def prepare(folder: Path) -> None:
    """A folder in which any of them can run, and waits to be killed."""
    folder.mkdir()
    for path in SCRIPTS.glob("*.py"):
        shutil.copy(path, folder)
    (folder / "kill-me").touch()
    (folder / "at").write_text("0\n")
    write_text(folder / "titan")


def write_text(folder: Path) -> None:
    """A little text, and a tokenizer of its bytes."""
    text = folder / "text" / "train.jsonl"
    text.parent.mkdir(parents=True)
    line = json.dumps({"text": "the quick brown fox jumps over the lazy dog. " * 20})
    text.write_text(f"{line}\n" * 200)
    train_tokenizer([text], 300).save(str(folder / "tokenizer.json"))


def kill_a_rank(job: EngineJob, folder: Path) -> None:
    """Kill a process of a program on an engine in the middle of its run."""
    job.wait((folder / "reached").exists, "the middle of its run")
    pids = worker_pids(job.node_of(-1), NUMBER)
    os.kill(pids[max(pids)], signal.SIGKILL)
    job.wait(lambda: job.job().get("generation", 0) > 1, "the next generation")
