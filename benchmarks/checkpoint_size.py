"""Whether compressed or incremental checkpoints pay: a small model after some training.

    python -m benchmarks.checkpoint_size

Prints, for weights and for each moment, what zstd saves and how fast it is on one core (by the
time that it ran there, not by the clock on the wall: others may be busy), and how much of a
checkpoint is the same as in the one some steps before. Beside them what a checkpoint does not
hold: the weights in bfloat16, and in float32 with the bytes of each significance together.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
import zstandard

from phalanx.config import check, job_from_table, resolve
from phalanx.parallel import build_mesh
from phalanx.train.trainer import Trainer
from proof.report import report

CHUNK_BYTES = 1 << 16  # of incremental saves: smaller than any tensor here
KINDS = ("model.", "optimizer.exp_avg.", "optimizer.exp_avg_sq.")


def content(trainer: Trainer) -> dict[str, bytes]:
    """The bytes of each kind of state, one tensor after another."""
    tensors = trainer.tensors()
    return {
        kind: b"".join(
            tensor.detach().contiguous().view(-1).numpy().tobytes()
            for name, tensor in sorted(tensors.items())
            if name.startswith(kind)
        )
        for kind in KINDS
    }


def main() -> int:
    """Train, compress, compare."""
    parser = argparse.ArgumentParser(description="Do compressed or incremental saves pay?")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--apart", type=int, default=1, help="steps between the two compared")
    options = parser.parse_args()
    table = {
        "model": {"dim": 256, "layers": 4, "heads": 4, "ffn": 1024, "vocab": 4096},
        "data": {"sequence": 64, "prefetch": 0},
        "train": {"steps": 10_000, "global_batch": 4, "micro_batch": 4, "device": "cpu"},
    }
    job = resolve(job_from_table(table), 1)
    check(job, 1)
    device = torch.device("cpu")
    trainer = Trainer(job, build_mesh(job, device), device)
    for _ in range(options.steps):
        trainer.train_step()
    before = content(trainer)
    for _ in range(options.apart):
        trainer.train_step()
    after = content(trainer)
    figures: dict[str, float] = {"unchanged": 0.0, "saved": 0.0}
    for kind, data in after.items():
        starts = range(0, len(data), CHUNK_BYTES)
        old = before[kind]
        same = sum(data[i : i + CHUNK_BYTES] == old[i : i + CHUNK_BYTES] for i in starts)
        figures["unchanged"] = max(figures["unchanged"], same / len(starts))
        figures["saved"] = max(figures["saved"], 1 - compressed_bytes(data) / len(data))
        print(
            f"{kind:24} {packed(data)}   unchanged after {options.apart} steps: "
            f"{same / len(starts):6.1%} of 64 KiB chunks"
        )
    weights = torch.frombuffer(bytearray(after["model."]), dtype=torch.float32)
    planes = weights.view(torch.uint8).view(-1, 4).t().contiguous()
    print(f"{'weights, bfloat16':24} {packed(raw(weights.bfloat16()))}")
    print(f"{'weights, byte planes':24} {packed(raw(planes))}")
    return report("checkpoint-size", figures)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.view(-1).view(torch.uint8).numpy().tobytes()


def compressed_bytes(data: bytes) -> int:
    return len(zstandard.ZstdCompressor(level=1).compress(data))


def packed(data: bytes) -> str:
    """What zstd makes of some bytes, and how fast; the best of three."""
    seconds = []
    for _ in range(3):
        began = time.thread_time()
        size = compressed_bytes(data)
        seconds.append(time.thread_time() - began)
    rate = len(data) / min(seconds) / 1e9
    return f"{len(data) / 1e6:7.1f} MB   zstd-1 {len(data) / size:5.2f}x at {rate:4.2f} GB/s a core"


if __name__ == "__main__":
    sys.exit(main())
