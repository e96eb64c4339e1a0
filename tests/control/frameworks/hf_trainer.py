"""The Trainer of transformers, with its own checkpoints."""

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from waiting import wait_to_be_killed

FOLDER = Path("hf")


class Samples(torch.utils.data.Dataset):
    """Random tokens, the same every time."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Wait(TrainerCallback):
    """Waits to be killed."""

    def on_step_end(self, args, state, control, **more):
        """After the step's checkpoint would be due."""
        wait_to_be_killed(state.global_step, at=12)


def newest() -> str | None:
    """The newest whole checkpoint."""
    whole = [path.parent for path in FOLDER.glob("checkpoint-*/trainer_state.json")]
    return max((str(p) for p in whole), key=lambda p: int(p.rpartition("-")[2]), default=None)


torch.manual_seed(1)
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
arguments = TrainingArguments(
    output_dir=str(FOLDER),
    max_steps=20,
    save_steps=5,
    per_device_train_batch_size=2,
    use_cpu=True,
    ddp_backend="gloo",
    report_to=[],
    logging_steps=5,
)
found = newest()
print(f"begins after {found}", flush=True)
trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Samples(), callbacks=[Wait()])
trainer.train(resume_from_checkpoint=found)
print(f"ends at step {trainer.state.global_step}", flush=True)
