"""One replica under torchft: a model of the demo's size, a line for every attempt at a step."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import TCPStore


def main() -> None:
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    adam = torch.optim.AdamW(model.parameters())
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": adam.state_dict()},
        min_replica_size=1,
        replica_id=f"replica_{sys.argv[1]}_",
        timeout=timedelta(seconds=10),
        quorum_timeout=timedelta(seconds=30),
    )
    trained, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, adam)
    while True:
        optimizer.zero_grad()
        trained(torch.randn(64, 256)).square().mean().backward()
        optimizer.step()
        said = {"participants": manager.num_participants(), "committed": manager.current_step()}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
