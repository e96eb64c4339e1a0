"""A checkpoint evaluated, or made to write, by one process or by a group of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from phalanx.checkpoint import CheckpointError
from phalanx.checkpoint.format.manifest import MANIFEST_FILE
from phalanx.config import ConfigError
from phalanx.train.evaluate.generate import Sampling
from phalanx.train.evaluate.lead import LeadScorer, follow, leading
from phalanx.train.evaluate.loaded import LoadedModel, load_model
from phalanx.train.evaluate.plan import Evaluation, EvaluationPlan
from phalanx.train.evaluate.score import DEFAULT_ROWS, ModelScorer
from phalanx.train.evaluate.scores import Scores
from phalanx.train.evaluate.text import needed_codec
from phalanx.train.parity.ranks import RankError, run_group
from phalanx.train.resume.parent import checkpoint_at, newest_of_name

GROUP_SECONDS = 30 * 86_400.0  # that ranks wait for each other: an evaluation may be long


class ModelPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Which checkpoint is loaded, and onto what."""

    checkpoint: str
    device: str = "auto"  # auto, cpu or cuda
    dtype: str = "auto"  # auto: float32 on CPU, bfloat16 on CUDA
    ranks: int = 1  # processes on this machine
    tensor: int = 1  # of these, so many split each matrix; the others are replicas
    sequence: int = 0  # tokens that the model sees at most; 0: as its job trained on
    tokenizer: str = ""  # a tokenizer.json or its folder; "": that of the run's corpus
    rows: int = DEFAULT_ROWS  # texts that a replica computes at a time


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """What a model wrote after a prompt."""

    prompt: str
    text: str
    tokens: int


class EvaluationError(Exception):
    """Why a checkpoint cannot be evaluated, in words."""


Answer = TypeVar("Answer")
Work = Callable[[LoadedModel, LeadScorer], Answer]


def evaluate_checkpoint(place: ModelPlace, plan: EvaluationPlan) -> Scores:
    """Scores of a checkpoint, on this machine."""

    def work(loaded: LoadedModel, scorer: LeadScorer) -> Scores:
        evaluation = Evaluation(plan, loaded.codec, loaded.model.config.vocab)
        found = evaluation.run(scorer)
        return Scores(
            checkpoint=loaded.checkpoint,
            step=loaded.step,
            scores=found.scores,
            problems=found.problems,
        )

    return _with_model(place, work, Scores)


def write_texts(place: ModelPlace, prompts: list[str], sampling: Sampling) -> list[Written]:
    """What a checkpoint's model writes after each prompt."""

    def work(loaded: LoadedModel, scorer: LeadScorer) -> list[Written]:
        codec = needed_codec(loaded.codec, "text")
        tokens = [codec.encode(prompt, special=True) or [codec.start] for prompt in prompts]
        texts = scorer.generate(tokens, sampling)
        return [
            Written(prompt=prompt, text=codec.decode(text), tokens=len(text))
            for prompt, text in zip(prompts, texts, strict=True)
        ]

    return _with_model(place, work, list[Written])


class _Told(msgspec.Struct):
    """A rank's answer, or why there is none."""

    answer: msgspec.Raw = msgspec.Raw(b"null")
    problem: str = ""


def _with_model(place: ModelPlace, work: Work[Answer], kind: type[Answer]) -> Answer:
    """Load the model on every rank and do the work on the first, which the others help."""

    def on_rank() -> bytes:
        try:
            answer = _on_rank(place, work)
        except (ConfigError, CheckpointError, OSError) as error:
            return msgspec.json.encode(_Told(problem=str(error)))
        return msgspec.json.encode(_Told(answer=msgspec.Raw(msgspec.json.encode(answer))))

    if place.ranks % place.tensor:
        rule = f"does not divide the {place.ranks} ranks"
        raise EvaluationError(f"tensor = {place.tensor}: {rule}; take a divisor of them")
    if place.ranks == 1:
        told = on_rank()
    else:
        device = "cuda" if _on_cuda(place) else "cpu"
        try:
            told = run_group(place.ranks, on_rank, GROUP_SECONDS, device=device)[0]
        except RankError as error:
            raise EvaluationError(str(error)) from None
    found = msgspec.json.decode(told, type=_Told)
    if found.problem:
        raise EvaluationError(found.problem)
    return msgspec.json.decode(found.answer, type=kind)


def _on_rank(place: ModelPlace, work: Work[Answer]) -> Answer | None:
    """The answer on the first rank, None on the others."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = torch.device("cuda", rank) if _on_cuda(place) else torch.device("cpu")
    loaded = load_model(
        _found(place.checkpoint),
        _dtype(place, device),
        device,
        tensor=place.tensor,
        sequence=place.sequence,
        tokenizer=Path(place.tokenizer) if place.tokenizer else None,
    )
    scorer = ModelScorer(loaded, place.rows)
    if rank:
        follow(scorer, device)
        return None
    with leading(scorer, device) as lead:
        return work(loaded, lead)


def _found(where: str) -> Path | str:
    """A checkpoint: the one named, or the newest of a run or of all runs of a name."""
    if "://" in where:
        return where
    path = checkpoint_at(Path(where))
    return path if (path / MANIFEST_FILE).exists() else newest_of_name(path) or path


def _on_cuda(place: ModelPlace) -> bool:
    # Asked of the driver, not of the runtime, which ranks that are forked could not use any more.
    return place.device == "cuda" or (place.device == "auto" and torch.cuda.device_count() > 0)


def _dtype(place: ModelPlace, device: torch.device) -> torch.dtype:
    name = place.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16"
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
