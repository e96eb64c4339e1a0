"""One of several ranks that share a GPU: verifies steps of a sharded job and writes what it found.

    python -m tests.gpu.verified_ranks RANK WORLD FOLDER FLIPS SECTIONS

NCCL has one rank a GPU, so these speak gloo. ``SECTIONS`` of the job file are JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.train.verified_steps import make_flipped_steps, make_trainer


def main(rank: int, world: int, folder: Path, flips: int, sections: str) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group(
        "cpu:gloo,cuda:gloo",
        store=dist.FileStore(str(folder / "store"), world),
        rank=rank,
        world_size=world,
    )
    trainer = make_trainer(world, "cuda", **json.loads(sections))
    made = make_flipped_steps(trainer, flips, seed=3, bits=16)
    assert not torch.are_deterministic_algorithms_enabled()
    found = {"named": made.named, "culprits": made.culprits, "alarms": made.alarms}
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    trainer.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    number, ranks, path, count, job = sys.argv[1:]
    main(int(number), int(ranks), Path(path), int(count), job)
