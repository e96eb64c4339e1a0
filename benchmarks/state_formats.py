"""Learning curves with AdamW's moments in fp32, bf16 and 8 bits: the demo's model on its text.

    python -m benchmarks.state_formats --steps 500

The loss is that of held-out samples at the end; on a CPU it takes some minutes for each format.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from phalanx.config import STATE_FORMATS, Job, StateFormat, load_job, resolve
from phalanx.data import DataError, read_manifest
from phalanx.parallel.mesh import build_mesh
from phalanx.train.trainer import Trainer
from proof.report import report

DEMO = Path(__file__).parent.parent / "examples" / "demo.toml"


def corpus(job: Job, folder: Path) -> Path:
    """The demo's, or the same made again."""
    with suppress(DataError):
        read_manifest(Path(job.data.path))
        return Path(job.data.path)
    command = [sys.executable, "-m", "phalanx", "data", "tokenize", "--stdlib"]
    command += ["--vocab-size", str(job.model.vocab), "--out", str(folder)]
    subprocess.run(command, check=True)
    return folder


def held_out_loss(demo: Job, text: Path, state: StateFormat, steps: int) -> float:
    """After so many steps in one process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    replace = msgspec.structs.replace
    wanted = replace(
        demo,
        parallel=type(demo.parallel)(),
        data=replace(demo.data, path=str(text)),
        optimizer=replace(demo.optimizer, state=state),
        train=replace(demo.train, steps=steps, micro_batch=16, device=device.type),
    )
    job = resolve(wanted, 1)
    trainer = Trainer(job, build_mesh(job, device), device)
    for _ in range(steps):
        trainer.train_step()
        trainer.timer.close_step()
    loss = trainer.validate()
    trainer.close()
    return loss


def main() -> int:
    """Train with each format and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    chosen = parser.parse_args()
    demo = resolve(load_job(DEMO), 4)
    with tempfile.TemporaryDirectory(prefix="phalanx-formats-") as folder:
        text = corpus(demo, Path(folder) / "corpus")
        losses = {each: held_out_loss(demo, text, each, chosen.steps) for each in STATE_FORMATS}
    for state, loss in losses.items():
        print(f"{state:10} {loss:.4f}", flush=True)
    exact = losses["float32"]
    figures: dict[str, float] = {"loss": exact}
    for state, loss in losses.items():
        figures[state] = abs(loss / exact - 1)
    return report("state-formats", figures)


if __name__ == "__main__":
    sys.exit(main())
