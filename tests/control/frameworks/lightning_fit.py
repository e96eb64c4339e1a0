"""Lightning's Trainer under its DDP strategy, with its own checkpoints."""

import os
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from waiting import wait_to_be_killed

import phalanx

FOLDER = Path("lightning")


class Module(lightning.LightningModule):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def training_step(self, batch, index):
        """The loss of a batch."""
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        """As usual."""
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Wait(Callback):
    """Waits to be killed."""

    def on_train_batch_end(self, trainer, *more) -> None:
        """After the step's checkpoint."""
        wait_to_be_killed(trainer.global_step, at=12)


lightning.seed_everything(1)
saving = ModelCheckpoint(FOLDER, every_n_train_steps=5, save_last=True, save_top_k=-1)
found = FOLDER / "last.ckpt"
print(f"begins after {found if found.exists() else None}", flush=True)
trainer = lightning.Trainer(
    accelerator="cpu",
    strategy="ddp",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    max_steps=20,
    callbacks=[saving, Wait(), phalanx.lightning_callback()],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
data = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=4)
trainer.fit(Module(), data, ckpt_path=str(found) if found.exists() else None)
print(f"ends at step {trainer.global_step}", flush=True)
