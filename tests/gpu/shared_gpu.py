"""One rank of several that share a GPU: it works, reduces over gloo, and writes its records.

    python -m tests.gpu.shared_gpu RANK WORLD FOLDER PART FACTOR

From step ``ONSET`` on the last rank is slow: ``gpu``: the device has more to do, ``host``: the host
takes longer to give it its work. NCCL refuses two ranks on one GPU; gloo moves the same tensors.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.train.measure.timing import StepTimer
from phalanx.train.report.records import encode
from tests.observe.records import step_record

ONSET, STEPS, LOG_EVERY = 20, 70, 10
CHUNKS = 2  # of a step, with a reduction after each
SIZE = 4096
MATMULS = 120  # of a chunk, where the device sets the pace
LAUNCHES, LAUNCH_SECONDS = 40, 0.002  # of a chunk, where the host does


def main(rank: int, world: int, folder: Path, part: str, factor: float) -> None:
    """Make all steps."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    timer = StepTimer(device, peer_waits=True)
    x = torch.randn(SIZE, SIZE, device=device, dtype=torch.bfloat16)
    out, gradient = torch.empty_like(x), torch.ones(1 << 18, device=device)
    torch.mm(x, x, out=out)
    dist.all_reduce(gradient)
    torch.cuda.synchronize()
    timer.restart()
    with (folder / f"rank-{rank}.jsonl").open("wb") as lines:
        for step in range(1, STEPS + 1):
            slow = factor if rank == world - 1 and step > ONSET else 1.0
            for _ in range(CHUNKS):
                with timer.phase("forward"):
                    work(x, out, part, slow)
                gradient.fill_(1.0)
                dist.all_reduce(gradient)
            timer.close_step()
            if step % LOG_EVERY == 0:
                for number, each in enumerate(timer.drain(), start=step - LOG_EVERY + 1):
                    record = step_record(
                        number, rank, step_seconds=each.seconds, parts=each.parts, sends=each.sends
                    )
                    lines.write(encode(record))
    dist.destroy_process_group()


def work(x: torch.Tensor, out: torch.Tensor, part: str, slow: float) -> None:
    """A chunk of a step."""
    if part == "host":
        for _ in range(LAUNCHES):
            time.sleep(LAUNCH_SECONDS * slow)
            torch.mm(x[:512], x, out=out[:512])
    else:
        for _ in range(round(MATMULS * slow)):
            torch.mm(x, x, out=out)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], float(sys.argv[5]))
