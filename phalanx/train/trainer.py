"""A trainer makes steps: data in, update applied, numbers left on the device."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import zlib
from collections.abc import Callable
from functools import cached_property
from typing import Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from phalanx.checkpoint import Extra, Manifest
from phalanx.config import (
    BatchRamp,
    Job,
    batch_ramp,
    takes_unequal_shares,
    verification_interval,
    virtual_replicas,
)
from phalanx.data import Batch, Feed, StepBatches
from phalanx.model import Router
from phalanx.parallel import Engine, LossScale, Mesh, all_sum, update_expert_biases
from phalanx.train.measure.timing import StepTimer
from phalanx.train.optim.groups import refuse_unused_groups
from phalanx.train.optim.guard import Guard
from phalanx.train.optim.optimizer import build_optimizer
from phalanx.train.optim.schedule import learning_rate_factor
from phalanx.train.reductions import loss_and_norm, loss_and_tokens

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
        self, job: Job, mesh: Mesh, device: torch.device, feed: Feed | None = None
    ) -> None:
        configure_torch(job, device)
        self.job, self.mesh, self.device = job, mesh, device
        self.generation = 0
        self.shares: tuple[int, ...] = ()  # micro-batches by replica; (): equal
        self.engine = Engine(job, mesh)
        refuse_unused_groups(job)
        offload = job.memory.offload == "optimizer" and device.type == "cuda"
        self.optimizer = build_optimizer(self.engine.weights, job.optimizer, offload=offload)
        self.loss_scale = LossScale(job.precision, device)
        self.guard = Guard(job.optimizer, device, always_finite=self.loss_scale.active)
        self.agreement = Agreement(mesh)
        self.timer = StepTimer(device, peer_waits=True)
        self.feed = feed or self._open_feed("train", batch_ramp(job))
        self.cursor = self.feed.start()
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
        self.loss_scale.update(verdict.overflowed)
        update_expert_biases(self.engine.parts, self.mesh.stage_group, verdict.skip)
        self.engine.clear_gradients()
        return StepOutcome(
            loss=total,
            grad_norm=norm,
            skipped=verdict.skip,
            learning_rate=rate,
            first_sample=batches.step_first_sample,
            samples=batches.samples,
            tokens=batches.samples * self.job.data.sequence,
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

        NaN where no token of them has a label.
        """
        wanted = self.job.train.validate_samples
        with self._open_feed("validation", wanted) as feed:
            held_out = feed.samples
        # As one large batch; where fewer are held out, each of them once.
        with self._open_feed("validation", min(wanted, held_out)) as feed:
            batches = feed.next(feed.start())
        one = torch.ones((), device=self.device)
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
        tensors |= self.optimizer.tensors()
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
        theirs = manifest.config.get("optimizer", {}).get("state", "float32")
        if theirs != (ours := self.job.optimizer.state):
            log.warning("the optimizer's moments were %s and go on as %s", theirs, ours)
        self.step, self.tokens = manifest.step, manifest.tokens
        self.generation = manifest.generation
        self.cursor = manifest.cursor
        if manifest.rng:
            _restore_random_state(manifest.rng, self.device)

    def publish_weights(self) -> None:
        """Bring masters that were changed from outside to the weights that compute."""
        for weight in self.engine.weights:
            weight.publish()

    def close(self) -> None:
        """End the reading thread."""
        self.feed.close()

    def _open_feed(self, split: Literal["train", "validation"], batch: int | BatchRamp) -> Feed:
        job = self.job
        return Feed(
            job.data,
            job.model.vocab,
            batch,
            job.train.micro_batch,
            self.mesh.data_index,
            job.parallel.data,
            split,
            pin=self.device.type == "cuda",
            virtual=virtual_replicas(job, self.mesh.data_index),
        )


class AgreedStep(NamedTuple):
    """What all ranks know of a step."""

    stop: bool  # all leave after it
    labels: int  # tokens of its batch that have one
    damaged: int  # samples of its batch
    same_shares: bool  # all want the same
    may_write: bool  # all may write a checkpoint
    keepers_late: bool  # somebody's last snapshot is not safe within its deadline
    failure_rate: int  # that all have heard of; 0: they have not yet


class Agreement:
    """One small reduction a step: how many tokens count, how many samples are damaged, and
    whether anybody wants to stop.

    The tokens stay on the device. The rest is copied to the host behind the step's work and read
    at its end, when the device passed this point long ago. The copy has a stream of its own: the
    device copies one thing after the other, and behind a snapshot the step's kernels would wait.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        cuda = mesh.device.type == "cuda"
        # Pinned, or the copies would make the host wait; reused, which `outcome` makes safe.
        self._host = torch.zeros(7, dtype=torch.float64, pin_memory=cuda)
        self._answer = torch.zeros(7, dtype=torch.float64, pin_memory=cuda)
        self._stream = torch.cuda.Stream(mesh.device) if cuda else None
        self._copied = torch.cuda.Event() if cuda else None

    def start(
        self,
        real_tokens: int,
        damaged: int,
        stop_requested: bool,
        shares: tuple[int, ...] = (),
        may_write: bool = True,
        keeper_late: bool = False,
        failure_rate: int = 0,
    ) -> Tensor:
        """Tell the others; returns the real tokens of the global batch, on the device."""
        self._host[0] = real_tokens / self._mesh.ranks_per_sample
        self._host[1] = damaged / self._mesh.ranks_per_sample
        self._host[2] = float(stop_requested)
        self._host[3] = float(zlib.crc32(repr(shares).encode()) if shares else 0)
        self._host[4] = float(may_write)
        self._host[5] = float(keeper_late)
        self._host[6] = float(failure_rate)
        values = all_sum(self._host.to(self._mesh.device, non_blocking=True, copy=True))
        if self._stream is None or self._copied is None:
            self._answer.copy_(values)
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._answer.copy_(values, non_blocking=True)
            self._copied.record(self._stream)
            values.record_stream(self._stream)
        return values[0].round().float()

    def outcome(self) -> AgreedStep:
        """What the others told."""
        if self._copied is not None:
            self._copied.synchronize()
        labels, damaged, stop, shares, may_write, late, rate = self._answer.tolist()
        own, heard, world = float(self._host[3]), float(self._host[6]), self._mesh.world_size
        return AgreedStep(
            stop=stop > 0,
            labels=round(labels),
            damaged=round(damaged),
            same_shares=own > 0 and shares == own * world,
            may_write=round(may_write) == world,
            keepers_late=late > 0,
            failure_rate=round(heard) if rate == heard * world else 0,
        )


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
