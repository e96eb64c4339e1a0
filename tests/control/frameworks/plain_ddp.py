"""torch's DistributedDataParallel, with a checkpoint file of its own."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from waiting import wait_to_be_killed

FILE = Path("ddp.pt")

dist.init_process_group("gloo")
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
first = 0
if FILE.exists():
    state = torch.load(FILE)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"]
print(f"rank {dist.get_rank()} begins after step {first}", flush=True)
step = first  # all of them, where gloo's threads ended the one before on its way out
for step in range(first + 1, 21):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    loss = model(torch.randn(4, 8, generator=generator)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        dist.barrier()
        if dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step}, "ddp.tmp")
            os.replace("ddp.tmp", FILE)  # noqa: PTH105
        dist.barrier()
    wait_to_be_killed(step)
print(f"rank {dist.get_rank()} ends at step {step}", flush=True)
dist.destroy_process_group()
