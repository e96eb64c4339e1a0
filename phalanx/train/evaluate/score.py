"""Scorers, which compute log-likelihoods: a loaded model, or a training gang."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.data import Batch
from phalanx.model import Transformer
from phalanx.parallel import Engine, all_sum
from phalanx.parallel.recompute import compiles
from phalanx.train.evaluate.generate import Sampling, generate
from phalanx.train.evaluate.loaded import LoadedModel
from phalanx.train.evaluate.rows import Round, ScoreRequest, TokenScore, rounds

DEFAULT_ROWS = 8  # texts that a loaded model scores, or writes, at a time


class Scorer(Protocol):
    """Scores texts. Ranks of a group all call it with the same requests."""

    sequence: int  # tokens that the model sees at most
    rows_at_once: int  # texts in one forward pass of all ranks together

    def score(self, requests: Sequence[ScoreRequest]) -> list[TokenScore]:
        """Score the tokens of each request."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        """Generate texts after each prompt."""


class ModelScorer:
    """Scores with a loaded model; replicas in the group share the requests."""

    def __init__(self, loaded: LoadedModel, rows: int = DEFAULT_ROWS) -> None:
        self.loaded, self.rows, self.sequence = loaded, rows, loaded.sequence
        world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        self.replicas, self.replica = world // loaded.tensor, rank // loaded.tensor
        self.rows_at_once = rows * self.replicas

    def score(self, requests: Sequence[ScoreRequest]) -> list[TokenScore]:
        model, device = self.loaded.model, self.loaded.device
        each = rounds(
            requests,
            self.rows,
            self.replica,
            self.replicas,
            sequence=self.sequence,
            multiple=self.loaded.tensor,
        )

        def forward(batch: Batch) -> Tensor:
            model.prepare(torch.arange(batch.tokens.shape[1], device=device))
            tokens, labels = torch.from_numpy(batch.tokens), torch.from_numpy(batch.labels)
            out: Tensor = model(tokens.to(device), labels.to(device))
            return out

        with torch.no_grad(), _scores_rows([model]):
            return _gathered(len(requests), each, forward, self.loaded.tensor, device)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        written: list[list[int]] = [[] for _ in prompts]
        mine = range(self.replica, len(prompts), self.replicas)
        for first in range(0, len(mine), self.rows):
            numbers = mine[first : first + self.rows]
            texts = generate(self.loaded, [prompts[i] for i in numbers], sampling, numbers)
            for number, text in zip(numbers, texts, strict=True):
                written[number] = text
        if self.replicas == 1:
            return written
        told: list[list[list[int]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(told, written)
        by_replica = told[:: self.loaded.tensor]
        return [by_replica[i % self.replicas][i] for i in range(len(prompts))]


class GangScorer:
    """Scores with all ranks of a training gang, on any mesh, without affecting training."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.sequence = engine, engine.job.data.sequence
        self.rows_at_once = engine.job.train.micro_batch * engine.job.parallel.data
        # Positions that ranks divide, and compiled blocks, are made for one length of rows.
        context = engine.job.parallel.context > 1
        self.fixed_width = context or compiles(engine.job, engine.mesh)

    def score(self, requests: Sequence[ScoreRequest]) -> list[TokenScore]:
        engine, mesh = self.engine, self.engine.mesh
        one = torch.ones((), device=mesh.device)
        each = rounds(
            requests,
            engine.job.train.micro_batch,
            mesh.data_index,
            mesh.parallel.data,
            sequence=self.sequence,
            fixed_width=self.fixed_width,
            multiple=mesh.parallel.tensor,
        )

        def forward(batch: Batch) -> Tensor:
            if not self.fixed_width:
                positions = torch.arange(batch.tokens.shape[1], device=mesh.device)
                for part in engine.parts:
                    part.prepare(positions)
            return engine.evaluate([batch], one)[0]

        with _same_positions(engine.parts), _scores_rows(engine.parts):
            return _gathered(len(requests), each, forward, mesh.parallel.tensor, mesh.device)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        raise NotImplementedError("tasks that generate are refused before training begins")


@contextmanager
def _scores_rows(parts: Sequence[Transformer]) -> Iterator[None]:
    """Make heads return the score of each row's labels instead of a summed loss."""
    heads = [part.head for part in parts if part.head is not None]
    for head in heads:
        head.scores_rows = True
    try:
        yield
    finally:
        for head in heads:
            head.scores_rows = False


@contextmanager
def _same_positions(parts: Sequence[Transformer]) -> Iterator[None]:
    """Restore the position tables of training on exit."""
    names = ("cos", "sin", "window_cos", "window_sin", "token_weight")
    before = [{name: getattr(part, name) for name in names} for part in parts]
    try:
        yield
    finally:
        for part, tables in zip(parts, before, strict=True):
            for name, table in tables.items():
                setattr(part, name, table)


def _gathered(
    count: int,
    each: Iterator[Round],
    forward: Callable[[Batch], Tensor],
    copies: int,
    device: torch.device,
) -> list[TokenScore]:
    """Gather the scores of all requests; ``copies`` ranks hold the same ones."""
    totals = torch.zeros((count, 2), dtype=torch.float64, device=device)
    for numbers, batch in each:
        out = forward(batch).double()
        if out.dim() and numbers:  # elsewhere the head is on another rank
            totals[numbers] = out[: len(numbers)] / copies
    return [TokenScore(total, misses < 0.5) for total, misses in all_sum(totals).tolist()]
