"""A trainer makes steps: data in, update applied, numbers left on the device."""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from phalanx.checkpoint import Extra, Manifest
from phalanx.config import ConfigError, Job, takes_unequal_shares, verification_interval
from phalanx.data import Batch, StepBatches
from phalanx.model import Router
from phalanx.parallel import Engine, LossScale, Mesh, balance_experts
from phalanx.train.agreement import Agreement
from phalanx.train.measure.timing import StepTimer
from phalanx.train.optim.average import WeightAverage
from phalanx.train.optim.groups import refuse_unused_groups
from phalanx.train.optim.guard import Guard
from phalanx.train.optim.optimizer import build_optimizer
from phalanx.train.optim.qk_clip import QkClip
from phalanx.train.optim.schedule import learning_rate_factor
from phalanx.train.reductions import loss_and_norm, loss_and_tokens
from phalanx.train.stages import RunStages, TrainFeed

log = logging.getLogger(__name__)

ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # somebody's own

NO_LABELS = "step %d: no token of its batch has a label, so that there was nothing to learn"


class StepOutcome(NamedTuple):
    """What a step leaves behind. Tensors are scalars on the device, the same on every rank."""

    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor
    learning_rate: float
    first_sample: int
    samples: int
    tokens: int
    labels: int  # tokens of the global batch that have one, and so a weight in the loss
    damaged: int  # samples of the global batch that cannot be read and carry no weight
    stop: bool  # all ranks agreed to stop after this step
    may_write: bool = True  # all ranks have leave to write a durable checkpoint after it
    keepers_late: bool = False  # the last snapshot of some rank is not safe within its deadline
    failure_rate: int = 0  # of the fleet, that all ranks have heard of; 0: they have not


class StepVote(NamedTuple):
    """What a rank says of itself to all others with each step."""

    stop: bool = False  # it was asked to stop
    shares: tuple[int, ...] = ()  # micro-batches by replica that are wanted; (): as they are
    may_write: bool = True  # a durable checkpoint
    keeper_late: bool = False  # its last snapshot is not safe within its deadline
    failure_rate: int = 0  # of the fleet, per million node-days, as it heard; 0: it did not


NO_WISHES = StepVote()


def _nothing(*_: object) -> None:
    """Before what nobody waits for."""


class Trainer:
    """Owns the model, its optimizer and its place in the data."""

    def __init__(
        self, job: Job, mesh: Mesh, device: torch.device, feed: TrainFeed | None = None
    ) -> None:
        configure_torch(job, device)
        self.job, self.mesh, self.device = job, mesh, device
        self.generation = 0
        self.shares: tuple[int, ...] = ()  # micro-batches by replica; (): equal
        self.engine = Engine(job, mesh)
        refuse_unused_groups(job)
        folder = offload_folder(job)
        away = job.memory.offload == "optimizer" and (device.type == "cuda" or folder is not None)
        self.optimizer = build_optimizer(
            self.engine.weights,
            job.optimizer,
            offload=away,
            folder=folder,
            group=mesh.stage_group,
        )
        self.qk_clip = QkClip(self.engine)
        self.average = WeightAverage(self.engine.weights, job.train.ema)
        self.loss_scale = LossScale(job.precision, device)
        self.guard = Guard(job.optimizer, device, always_finite=self.loss_scale.active)
        self.agreement = Agreement(mesh)
        self.timer = StepTimer(device, peer_waits=True)
        self.stages = RunStages(job, mesh.data_index, pin=device.type == "cuda")
        self.feed = feed or self.stages.train_feed()
        self.cursor = self.feed.start()
        self._stage = self.stages.at(self.cursor)
        self.step = 0
        self.tokens = 0
        self.unsaved = False  # the state that it continues from is in memory alone

    def train_step(
        self,
        vote: StepVote = NO_WISHES,
        before_update: Callable[[], None] = _nothing,
        before_forward: Callable[[list[Batch], Tensor], None] = _nothing,
    ) -> StepOutcome:
        """One optimizer step over the next global batch.

        ``before_update`` is called before any of the state changes: a copy of it may still run.
        ``before_forward`` gets this rank's micro-batches and the weight of one of their tokens.
        """
        self._enter(self.stages.at(self.cursor))
        with self.timer.phase("data"):
            batches = self.feed.next(self.cursor)
        tokens = self.agreement.start(batches.real_tokens, batches.damaged, *vote)
        token_weight = self.loss_scale.value / tokens.clamp(min=1)  # without labels: nothing to do
        before_forward(batches.micro_batches, token_weight)
        loss = self.engine.run(batches.micro_batches, token_weight, self.timer)
        with self.timer.phase("optimizer"):
            outcome = self._update(loss, batches, tokens == 0, before_update)
        self.step += 1
        self.tokens += outcome.tokens
        self.cursor = self.feed.advance(self.cursor)
        with self.timer.phase("device"):
            agreed = self.agreement.outcome()
        if agreed.same_shares and vote.shares != self.shares:
            self.rebalance(vote.shares)
        if not agreed.labels:
            log.warning(NO_LABELS, self.step)
        return outcome._replace(
            stop=agreed.stop,
            labels=agreed.labels,
            damaged=agreed.damaged,
            may_write=agreed.may_write,
            keepers_late=agreed.keepers_late,
            failure_rate=agreed.failure_rate,
        )

    def _enter(self, stage: Job) -> None:
        """Have the engine take samples of a stage's length."""
        if stage is not self._stage:
            self._stage = stage
            self.engine.enter(stage)
            log.info("after step %d: samples of %d tokens", self.step, stage.data.sequence)

    def leave_out(self, known: tuple[tuple[int, int], ...], step: int) -> tuple[int, int]:
        """Never read samples that were left out before, nor (from now on) the batch of a step.

        Which samples those are follows from the cursor: batches may grow, and what was left out
        earlier moves all that comes after it. Returns them.
        """
        for first, past in known:
            if past > self.cursor.consumed:
                self.cursor = self.cursor.skip(first, past)
        if step <= self.step:
            return 0, 0
        at = self.cursor
        for _ in range(step - 1 - self.step):
            at = self.feed.advance(at)
        batch = at.next, self.feed.advance(at).consumed
        self.cursor = self.cursor.skip(*batch)
        return batch

    def rebalance(self, shares: tuple[int, ...]) -> None:
        """From the next step on replicas take these numbers of micro-batches; on all ranks alike.

        Where every micro-batch communicates, all have as many and the rest is padding.
        """
        self.shares = shares
        self.feed.rebalance(shares, padded=not takes_unequal_shares(self.job))

    def _update(
        self,
        loss: Tensor,
        batches: StepBatches,
        empty: Tensor,
        before_update: Callable[[], None],
    ) -> StepOutcome:
        """Reduce what the ranks know of the step, judge it, and apply it or not."""
        scale = self.loss_scale.value
        total, norm = loss_and_norm(self.engine, loss, scale)
        before_update()
        verdict = self.guard.judge(norm, scale, empty)
        rate = self.learning_rate
        self.optimizer.step(rate, verdict)
        self.qk_clip.apply(verdict.skip)
        self.average.update(self.step + 1, verdict.skip)
        self.loss_scale.update(verdict.overflowed)
        balance_experts(self.engine.parts, self.mesh.stage_group, verdict.skip)
        self.engine.clear_gradients()
        return StepOutcome(
            loss=total,
            grad_norm=norm,
            skipped=verdict.skip,
            learning_rate=rate,
            first_sample=batches.step_first_sample,
            samples=batches.samples,
            tokens=batches.samples * self._stage.data.sequence,
            labels=0,
            damaged=0,
            stop=False,
        )

    @property
    def learning_rate(self) -> float:
        """Of the step about to be made."""
        factor = learning_rate_factor(self.job.schedule, self.step, self.job.train.steps)
        return self.job.optimizer.learning_rate * factor

    def validate(self) -> float:
        """Mean loss over ``train.validate_samples`` held-out samples, the same ones every time.

        They are as long as those of the last step. NaN where no token of them has a label.
        """
        self._enter(self.stages.before(self.cursor))
        wanted, opened = self.job.train.validate_samples, self.stages.open_feed
        with opened(self._stage, "validation", wanted) as feed:
            held_out = feed.samples
        # As one large batch; where fewer are held out, each of them once.
        with opened(self._stage, "validation", min(wanted, held_out)) as feed:
            batches = feed.next(feed.start())
        one = torch.ones((), device=self.device)
        with self.optimizer.evaluated(), self.average.evaluated():
            losses = self.engine.evaluate(batches.micro_batches, one)
        loss = self.engine.share([each.sum() for each in losses])
        total, count = loss_and_tokens(self.engine, loss, batches.real_tokens)
        return total / count if count else math.nan

    def tensors(self) -> dict[str, Tensor]:
        """All state that lives in tensors, by name; loading fills these very tensors.

        Whoever reads them asks each time: what lives in host memory may still be on its way there.
        """
        self.optimizer.settle()
        return self._tensors

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        """Made once: every step may be saved, and nothing of it is ever given other memory."""
        tensors = {f"model.{w.name}": w.like(w.master) for w in self.engine.weights}
        for part in self.engine.parts:
            for name, module in part.named_modules():
                if isinstance(module, Router):
                    tensors[f"model.{name}.expert_bias"] = module.expert_bias
                    if module.load_share is not None:
                        tensors[f"balance.{name}.load_share"] = module.load_share
        tensors |= self.optimizer.tensors()
        tensors |= self.average.tensors()
        tensors |= {"guard.mean": self.guard.mean, "guard.good_steps": self.guard.good_steps}
        tensors |= {"scale.value": self.loss_scale.value, "scale.good": self.loss_scale.good_steps}
        return tensors

    def extra(self) -> Extra:
        """All other state, for the checkpoint's manifest."""
        return Extra(
            tokens=self.tokens,
            cursor=self.cursor,
            mesh=self.mesh.sizes | {"expert": self.job.parallel.expert},
            config_hash=config_hash(self.job),
            generation=self.generation,
            config=msgspec.to_builtins(self.job),
            rng=_random_state(self.device),
        )

    def restore(self, manifest: Manifest) -> None:
        """Continue from a checkpoint whose tensors have been loaded into ``tensors()``."""
        self.publish_weights()
        if manifest.config.get("train", {}).get("ema") is None:
            self.average.restart()  # the checkpoint has none
        theirs = manifest.config.get("optimizer", {}).get("state", "float32")
        if theirs != (ours := self.job.optimizer.state):
            log.warning("the optimizer's moments were %s and go on as %s", theirs, ours)
        self.step, self.tokens = manifest.step, manifest.tokens
        self.generation = manifest.generation
        self.cursor = manifest.cursor
        if manifest.rng:
            _restore_random_state(manifest.rng, self.device)

    def start_from_weights(self) -> None:
        """Begin with masters that were loaded without any other state."""
        self.publish_weights()
        self.average.restart()
        self.optimizer.restart()

    def publish_weights(self) -> None:
        """Bring masters that were changed from outside to the weights that compute."""
        for weight in self.engine.weights:
            weight.publish()

    def close(self) -> None:
        """End the reading thread."""
        self.feed.close()


def offload_folder(job: Job) -> Path | None:
    """Where a file takes the optimizer's state; None: it stays in memory."""
    folder = job.memory.offload_folder
    found = os.path.expandvars(folder)
    if "$" in found:
        rule = "names a variable that this node does not have"
        fix = "set it where ranks start, or give the folder's path"
        raise ConfigError("memory.offload_folder", f'"{folder}"', rule, fix)
    return Path(found).expanduser().absolute() if folder else None


def config_hash(job: Job) -> str:
    """Identity of a resolved configuration."""
    encoded = msgspec.json.encode(job, order="deterministic")
    return hashlib.blake2b(encoded, digest_size=8).hexdigest()


def configure_torch(job: Job, device: torch.device) -> None:
    """Process-wide settings that a job implies."""
    torch.manual_seed(job.train.seed)
    deterministic = job.train.deterministic or job.train.virtual_replicas > 0
    torch.set_float32_matmul_precision("highest" if deterministic else "high")
    if device.type == "cpu":
        torch.set_num_threads(job.train.cpu_threads)
    elif not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        # Segments that grow leave next to nothing that cannot be used again.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    if deterministic or verification_interval(job, device.type):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if deterministic:
        torch.use_deterministic_algorithms(True)


def _random_state(device: torch.device) -> bytes:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return msgspec.msgpack.encode([state.numpy().tobytes() for state in states])


def _restore_random_state(encoded: bytes, device: torch.device) -> None:
    states = msgspec.msgpack.decode(encoded, type=list[bytes])
    tensors = [torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in states]
    torch.set_rng_state(tensors[0])
    if device.type == "cuda" and len(tensors) > 1:
        torch.cuda.set_rng_state(tensors[1], device)
