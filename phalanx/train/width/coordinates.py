"""The coordinate check: how far activations move in a few steps, for models of several widths.

Where settings transfer from one width to another (µP), that does not depend on the width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from msgspec import Struct, structs
from torch import Tensor, nn

from phalanx.config import (
    Checkpoint,
    ConfigError,
    Data,
    Job,
    Log,
    Model,
    Moe,
    Parallel,
    Schedule,
    check,
    resolve,
    resolve_model,
)
from phalanx.model import Layer
from phalanx.parallel import build_mesh
from phalanx.train.trainer import Trainer

# Few tokens: of many, each aligns too little with an update for narrow models to show their slope.
SEQUENCE, GLOBAL_BATCH, VOCAB, LAYERS = 8, 1, 256, 4
SEEDS = 3  # of weights, over which movements are averaged
BRANCHES = (".attention", ".mlp", ".moe")
STEADY = 0.5  # of the slope: noise stays below, and plain settings come to one or more


class Coordinate(Struct, frozen=True, kw_only=True):
    """How far one activation moved, for each width."""

    name: str
    moved: list[float]  # root mean square of the change since the start, by width
    slope: float  # of its logarithm over that of the width; 0: it does not depend on it

    @property
    def steady(self) -> bool:
        """Whether it moves as far at every width."""
        return abs(self.slope) <= STEADY


def coordinates(
    job: Job, widths: Sequence[int], steps: int, seen: Callable[[int], None]
) -> list[Coordinate]:
    """Train copies of a job's model at each width; ``seen`` is told of each width that is done."""
    by_width: list[dict[str, float]] = []
    for width in widths:
        by_width.append(mean_movements(at_width(job, width, steps), steps))
        seen(width)
    return [
        Coordinate(
            name=name,
            moved=[found[name] for found in by_width],
            slope=_slope(widths, [found[name] for found in by_width]),
        )
        for name in by_width[0]
    ]


def at_width(job: Job, width: int, steps: int) -> Job:
    """A small job whose model is the job's at another width: more heads of the same size."""
    wide = structs.replace(
        job,
        model=model_at_width(resolve_model(job.model), width),
        data=Data(sequence=SEQUENCE, seed=job.data.seed, prefetch=0),
        parallel=Parallel(zero=0),
        precision=structs.replace(job.precision, compute="float32", fp8=False),
        memory=structs.replace(job.memory, offload="none", offload_activations=False),
        schedule=Schedule(kind="constant"),
        train=structs.replace(
            job.train,
            steps=steps,
            global_batch=GLOBAL_BATCH,
            micro_batch=GLOBAL_BATCH,
            batch_ramp=(),
            sequence_stages=(),
            virtual_replicas=0,
            ema=None,
            compile="off",
            device="cpu",
            validate_every=0,
            verify_every=0,
        ),
        checkpoint=Checkpoint(interval="off", mode="sync"),
        log=Log(tensorboard=False),
    )
    check(wide, 1)
    return resolve(wide, 1)


def model_at_width(model: Model, width: int) -> Model:
    """A resolved model whose heads and hidden widths grow with the stream; ConfigError where one
    of them would be no whole number.
    """

    def grown(name: str, size: int) -> int:
        if size * width % model.dim:
            rule = f"model.{name} = {size} at model.dim = {model.dim} would be no whole number"
            unit = model.dim // math.gcd(size, model.dim)
            raise ConfigError("--widths", width, rule, f"take multiples of {unit}")
        return size * width // model.dim

    moe = model.moe and _experts_at_width(model.moe, grown)
    latent = model.latent and structs.replace(
        model.latent,
        query_rank=grown("latent.query_rank", model.latent.query_rank),
        key_value_rank=grown("latent.key_value_rank", model.latent.key_value_rank),
    )
    return structs.replace(
        model,
        preset="",
        dim=width,
        layers=min(model.layers, LAYERS),
        heads=grown("heads", model.heads),
        kv_heads=grown("kv_heads", model.kv_heads),
        ffn=grown("ffn", model.ffn),
        vocab=min(model.vocab, VOCAB),
        moe=moe,
        latent=latent,
    )


def _experts_at_width(moe: Moe, grown: Callable[[str, int], int]) -> Moe:
    return structs.replace(
        moe,
        ffn=grown("moe.ffn", moe.ffn),
        shared_ffn=grown("moe.shared_ffn", moe.shared_ffn),
    )


def mean_movements(job: Job, steps: int) -> dict[str, float]:
    """Over models with other initial weights."""
    trains = [structs.replace(job.train, seed=job.train.seed + more) for more in range(SEEDS)]
    found = [movements(structs.replace(job, train=train), steps) for train in trains]
    return {name: sum(one[name] for one in found) / SEEDS for name in found[0]}


def movements(job: Job, steps: int) -> dict[str, float]:
    """Root mean square of what each activation changed by, on the tokens of the first step."""
    device = torch.device("cpu")
    trainer = Trainer(job, build_mesh(job, device), device)
    (batch,) = trainer.feed.next(trainer.cursor).micro_batches
    tokens = torch.from_numpy(batch.tokens).clone()  # its memory serves later steps, too
    before = activations(trainer.engine.parts[0], tokens)
    for _ in range(steps):
        trainer.train_step()
    after = activations(trainer.engine.parts[0], tokens)
    trainer.close()
    return {name: float((after[name] - was).square().mean().sqrt()) for name, was in before.items()}


@torch.no_grad()
def activations(part: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """What embedding, branches and layers give, and the logits, by name."""
    found: dict[str, Tensor] = {}
    part.eval()
    with _recorded(part, found):
        found["logits"] = part(tokens).float()
    part.train()
    return found


@contextmanager
def _recorded(part: nn.Module, found: dict[str, Tensor]) -> Iterator[None]:
    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: object, out: Tensor) -> None:
            found[name] = out.detach().float().clone()

        return hook

    handles = [
        module.register_forward_hook(keep(name))
        for name, module in part.named_modules()
        if name == "embed" or isinstance(module, Layer) or name.endswith(BRANCHES)
        if name
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _slope(widths: Sequence[int], moved: Sequence[float]) -> float:
    """Of the line through the logarithms, by least squares."""
    xs = [math.log(width) for width in widths]
    ys = [math.log(max(value, 1e-30)) for value in moved]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - x_mean) ** 2 for x in xs)
    return sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / spread
