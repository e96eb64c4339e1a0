"""Phalanx's Trainer as one side of the speed comparison."""

from __future__ import annotations

import torch
from speed_shape import Row, State

from phalanx.config import Data, Job, Precision, Schedule, Train, resolve
from phalanx.parallel.mesh import build_mesh
from phalanx.train.optim.optimizer import AdamW
from phalanx.train.trainer import Trainer


def job(row: Row) -> Job:
    """A job as a user would write it: the model, the batch, random tokens."""
    wanted = Job(
        name="speed",
        model=row.model,
        data=Data(source="synthetic", sequence=row.sequence),
        precision=Precision(fp8=row.fp8),
        schedule=Schedule(kind="constant"),
        train=Train(steps=1_000_000, global_batch=row.batch, micro_batch=row.batch),
    )
    return resolve(wanted, 1)


class PhalanxSide:
    """Steps of Phalanx's Trainer."""

    def __init__(self, row: Row) -> None:
        device = torch.device("cuda", 0)
        settings = job(row)
        self.trainer = Trainer(settings, build_mesh(settings, device), device)
        self.loss = torch.zeros((), device=device)

    def step(self) -> None:
        self.loss = self.trainer.train_step().loss
        self.trainer.timer.close_step()

    def finish(self) -> None:
        self.trainer.timer.drain()

    def state(self) -> State:
        weights, optimizer = self.trainer.engine.weights, self.trainer.optimizer
        assert isinstance(optimizer, AdamW)
        return State(
            [weight.local for weight in weights],
            [weight.master for weight in weights],
            [tensor for moments in optimizer.moments for tensor in moments.stored],
        )
