"""A training loop by the textbook over a plain model, in fp64 and on one process."""

from __future__ import annotations

import fnmatch
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from phalanx.config import Job, Model
from phalanx.config.schema import ParameterGroup
from phalanx.data import Batch
from phalanx.train.evaluate.rows import ScoreRequest
from phalanx.train.stages import RunStages
from tests.parallel.random_jobs.plain_model import Extras, PlainModel, Sample, Weights
from tests.parallel.random_jobs.plain_muon import fused_rows, is_hidden_matrix, orthogonal

BETWEEN_SAMPLES = 4  # that pass through the model at a time


class PlainRun(NamedTuple):
    """What training comes to."""

    steps: list[tuple[float, float]]  # loss and gradient norm
    weights: Weights
    averages: Weights
    validated: float
    routers: Weights  # selection biases, and shares of the last batch


class PlainTraining:
    """Takes the steps of a job, resolved for one process, from given weights."""

    def __init__(self, job: Job, weights: Weights) -> None:
        self.job = job
        self.weights = {name: w.double().clone() for name, w in weights.items()}
        self.first = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.second = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.fast = {name: w.clone() for name, w in self.weights.items()}
        self.averages = {name: w.clone() for name, w in self.weights.items()}
        self.biases: Weights = {}
        self.shares: Weights = {}
        self.rate_squares, self.updates = 0.0, 0
        self.stages = RunStages(job, 0, pin=False)
        self.last_stage = job
        self.margins: list[float] = []  # by which experts were chosen

    def run(self) -> PlainRun:
        feed, steps = self.stages.train_feed(), []
        cursor = feed.start()
        for step in range(self.job.train.steps):
            stage = self.stages.at(cursor)
            steps.append(self.step(step, stage.model, rows(feed.next(cursor).micro_batches)))
            cursor = feed.advance(cursor)
        feed.close()
        self.last_stage = self.stages.before(cursor)
        validated = self.validate(self.last_stage)
        return PlainRun(
            steps, self.weights, self.averages, validated, self.biases | self.balance_shares()
        )

    def balance_shares(self) -> Weights:
        return {f"{path}.share": share for path, share in self.shares.items()}

    def model(self, model: Model, weights: Weights) -> PlainModel:
        plain = PlainModel(model, self.job.adapter, weights)
        plain.biases, plain.shares, plain.margins = self.biases, self.shares, self.margins
        return plain

    def step(self, step: int, model: Model, batch: Sample) -> tuple[float, float]:
        """One update; the loss before it, and the norm of its gradient."""
        trained, count = self.trained(), self.count(batch)
        for name, weight in self.weights.items():
            weight.requires_grad_(name in trained)
            weight.grad = None
        value, left = self.forward_and_backward(model, batch, max(count, 1))
        gradients = {}
        for name, weight in self.weights.items():
            weight.requires_grad_(False)
            if name in trained:
                gradients[name] = torch.zeros_like(weight) if weight.grad is None else weight.grad
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))
        if count:
            self.update(step, gradients, norm)
            self.clip_heads(model, left.peaks)
            self.balance(model, left.loads)
            self.average(step)
        return value, norm

    def forward_and_backward(self, model: Model, batch: Sample, count: int) -> tuple[float, Extras]:
        value, left = 0.0, Extras([], {}, {})
        for first in range(0, len(batch.tokens), BETWEEN_SAMPLES):
            part = Sample(*(t[first : first + BETWEEN_SAMPLES] for t in batch))
            plain = self.model(model, self.weights)
            plain.drops = self.job.train.seed
            loss, more, found = self.loss(plain, part)
            ((loss + more) / count).backward()
            value += loss.item() / count
            for path, load in found.loads.items():
                left.loads[path] = left.loads.get(path, torch.zeros_like(load)) + load
            for path, peak in found.peaks.items():
                left.peaks[path] = torch.maximum(left.peaks.get(path, peak), peak)
        return value, left

    def count(self, batch: Sample) -> int:
        """What a step's loss is divided by: its labels."""
        return int((batch.labels >= 0).sum())

    def loss(self, model: PlainModel, part: Sample) -> tuple[Tensor, Tensor, Extras]:
        """Of some samples, not yet divided: what is reported, what else is minimised, the rest."""
        return model.loss(part)

    def trained(self) -> set[str]:
        adapters = self.job.adapter.kind != "none"
        free = {n for n in self.weights if ".adapter." in n or not adapters}
        return {n for n in free if not (g := self.group(n)) or not g.freeze}

    def group(self, name: str) -> ParameterGroup | None:
        groups = self.job.optimizer.groups
        return next((g for g in groups if fnmatch.fnmatchcase(name, g.pattern)), None)

    def rates(self, name: str, rate: float, *, wide: bool = True) -> tuple[float, float]:
        """Learning rate and decay of one weight."""
        group, given, base = self.group(name), self.job.optimizer, self.job.model.width_base
        plain = "norm" in name or name.endswith(("bias", "sinks", "growth"))
        decay = 0.0 if plain else given.weight_decay
        if group is not None:
            rate *= group.rate_factor
            decay = decay if group.weight_decay is None else group.weight_decay
        if wide and base and not plain and name != "embed.weight":
            rate *= base / self.job.model.dim
        return rate, decay

    def update(self, step: int, gradients: Weights, norm: float) -> None:
        given = self.job.optimizer
        rate = given.learning_rate * factor(self.job, step)
        clip = min(1.0, given.clip_norm / (norm + 1e-6)) if given.clip_norm else 1.0
        self.updates += 1
        self.rate_squares += rate**2
        for name, gradient in gradients.items():
            own, decay = self.rates(name, rate)
            weight, gradient = self.weights[name], gradient * clip
            if given.kind == "muon" and is_hidden_matrix(name, weight):
                own = self.rates(name, given.muon_learning_rate, wide=False)[0]
                self.muon(name, own * factor(self.job, step), decay, gradient)
                continue
            self.second[name] = (
                given.beta2 * self.second[name] + (1 - given.beta2) * gradient.square()
            )
            spread = (self.second[name] / (1 - given.beta2**self.updates)).sqrt() + given.eps
            if given.kind == "schedule-free":
                self.free(name, own, decay, gradient / spread, rate**2 / self.rate_squares)
                continue
            self.first[name] = given.beta1 * self.first[name] + (1 - given.beta1) * gradient
            way = self.first[name] / (1 - given.beta1**self.updates) / spread
            weight.mul_(1 - own * decay).sub_(own * way)

    def free(self, name: str, rate: float, decay: float, way: Tensor, share: float) -> None:
        """Schedule-Free: x is the mean of z, and gradients are taken at y between them."""
        beta, y, z = self.job.optimizer.beta1, self.weights[name], self.fast[name]
        x = (y - (1 - beta) * z) / beta
        z = z - rate * (way + decay * y)
        x = (1 - share) * x + share * z
        self.fast[name] = z
        y.copy_((1 - beta) * z + beta * x)

    def muon(self, name: str, rate: float, decay: float, gradient: Tensor) -> None:
        """Each matrix by itself, also where several are stored as one."""
        weight, momentum = self.weights[name], self.job.optimizer.muon_momentum
        self.first[name] = momentum * self.first[name] + gradient
        way, moved = gradient + momentum * self.first[name], torch.zeros_like(weight)
        for rows in fused_rows(self.job.model, name, weight.shape[-2]):
            moved[..., rows, :] = orthogonal(way[..., rows, :])
        weight.mul_(1 - rate * decay).sub_(rate * moved)

    def clip_heads(self, model: Model, peaks: Weights) -> None:
        for path, peak in peaks.items():
            shrink = torch.where(peak > model.qk_clip, model.qk_clip / peak, torch.ones_like(peak))
            if model.latent is not None:
                self._clip_latent(model, path, shrink)
                continue
            each = model.heads // model.kv_heads
            by_key = shrink.view(-1, each)
            key = by_key.min(1).values.sqrt()
            for kind in ("weight", "bias"):
                if (packed := self.weights.get(f"{path}.qkv.{kind}")) is None:
                    continue
                heads = packed.view(model.kv_heads, each + 2, model.head_dim, -1)
                heads[:, :each] *= (by_key / key[:, None])[..., None, None]
                heads[:, each] *= key[:, None, None]

    def _clip_latent(self, model: Model, path: str, shrink: Tensor) -> None:
        latent = model.latent
        assert latent is not None
        content = latent.content_head_dim
        q = self.weights[f"{path}.q_up.weight"].view(
            model.heads, content + latent.rope_head_dim, -1
        )
        k = self.weights[f"{path}.kv_up.weight"].view(
            model.heads, content + latent.value_head_dim, -1
        )
        q[:, :content] *= shrink.sqrt()[:, None, None]
        q[:, content:] *= shrink[:, None, None]
        k[:, :content] *= shrink.sqrt()[:, None, None]

    def balance(self, model: Model, loads: Weights) -> None:
        moe = model.moe
        if moe is None:
            return
        for path, load in loads.items():
            if moe.balance in ("bias", "bias-auxiliary"):
                before = self.biases.get(path, torch.zeros_like(load))
                self.biases[path] = before + moe.bias_rate * torch.sign(load.mean() - load)
            if "auxiliary" in moe.balance and moe.auxiliary_over == "batch" and load.sum() > 0:
                self.shares[path] = load / load.sum()

    def average(self, step: int) -> None:
        ema = self.job.train.ema
        if ema is None or (step + 1) % ema.every:
            return
        decay = ema.decay if step + 1 > ema.begin_step else 0.0
        for name, weight in self.weights.items():
            self.averages[name] = decay * self.averages[name] + (1 - decay) * weight

    @torch.no_grad()
    def validate(self, stage: Job) -> float:
        """Mean loss of the held-out samples, each once."""
        if not self.job.data.validation_fraction:
            return 0.0
        weights, ema = self.weights, self.job.train.ema
        if ema is not None and ema.validate:
            weights = self.averages
        if self.job.optimizer.kind == "schedule-free":
            beta = self.job.optimizer.beta1
            weights = {n: (y - (1 - beta) * self.fast[n]) / beta for n, y in weights.items()}
        wanted = stage.train.validate_samples
        with self.stages.open_feed(stage, "validation", wanted) as feed:
            wanted = min(wanted, feed.samples)
        with self.stages.open_feed(stage, "validation", wanted) as feed:
            batch = rows(feed.next(feed.start()).micro_batches)
        model = self.model(stage.model, weights)
        states = model.states(batch, batch.labels >= 0, Extras([], {}, {}))
        total, count = model.cross_entropy(states, batch.labels)[0], (batch.labels >= 0).sum()
        return (total / count).item() if count else math.nan

    @torch.no_grad()
    def score(self, requests: list[ScoreRequest]) -> list[float]:
        """Log-probabilities of the last tokens of texts, each by itself, after the run."""
        found, model = [], self.model(self.last_stage.model, self.weights)
        for tokens, scored in requests:
            row, whole = torch.tensor(tokens[:-1])[None], torch.tensor(tokens[1:])
            sample = Sample(row, row, torch.zeros_like(row), torch.zeros(1))
            states = model.states(sample, row >= 0, Extras([], {}, {}))
            shares = model.logits(states)[0].log_softmax(-1)
            found.append(shares[torch.arange(len(whole)), whole][-scored:].sum().item())
        return found


def rows(batches: list[Batch]) -> Sample:
    """All micro-batches as one."""
    tokens = torch.from_numpy(np.concatenate([b.tokens for b in batches]))
    labels = torch.from_numpy(np.concatenate([b.labels for b in batches]))
    documents = torch.zeros_like(tokens)
    if batches[0].documents is not None:
        documents = torch.from_numpy(np.concatenate([b.documents for b in batches]))
    numbers = np.concatenate([b.samples for b in batches if b.samples is not None])
    return Sample(tokens, labels, documents, torch.from_numpy(numbers))


def factor(job: Job, step: int) -> float:
    """Of the learning rate at a step, counted from zero: a warmup, and a fall."""
    schedule, made, steps = job.schedule, step + 1, job.train.steps
    if made < schedule.warmup_steps:
        return made / schedule.warmup_steps
    peak, last = max(1, schedule.warmup_steps), schedule.final_fraction
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "wsd":
        peak = max(peak, steps - schedule.decay_steps)
    done = min(1.0, max(0, made - peak) / max(1, steps - peak))
    left = 1 - done
    if schedule.kind == "cosine" or (schedule.kind == "wsd" and schedule.decay_shape == "cosine"):
        left = (1 + math.cos(math.pi * done)) / 2
    if schedule.kind == "wsd" and schedule.decay_shape == "sqrt":
        left = 1 - math.sqrt(done)
    return last + (1 - last) * left
