"""A loop of accelerate's, with its own checkpoints."""

from pathlib import Path

import torch
from accelerate import Accelerator
from waiting import wait_to_be_killed

FOLDER, DONE = Path("accelerate"), Path("accelerate.step")

torch.manual_seed(1)
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
data = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=4)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
first = 0
if DONE.exists():
    first = int(DONE.read_text())
    accelerator.load_state(str(FOLDER / str(first)))
accelerator.print(f"begins after step {first} with {accelerator.num_processes} ranks", flush=True)
step = first
while step < 20:
    for batch in data:
        step += 1
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        if step % 5 == 0:
            accelerator.save_state(str(FOLDER / str(step)))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                DONE.write_text(str(step))
            accelerator.wait_for_everyone()
        wait_to_be_killed(step)
        if step == 20:
            break
accelerator.print(f"ends at step {step}", flush=True)
accelerator.end_training()
