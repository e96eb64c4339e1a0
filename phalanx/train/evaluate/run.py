"""Evaluate a checkpoint, or generate text with it, in one process or a group of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from phalanx.checkpoint import CheckpointError
from phalanx.config import ConfigError
from phalanx.train.evaluate.generate import Sampling
from phalanx.train.evaluate.lead import LeadScorer, follow, leading
from phalanx.train.evaluate.loaded import LoadedModel, load_model
from phalanx.train.evaluate.plan import Evaluation, EvaluationPlan
from phalanx.train.evaluate.score import DEFAULT_ROWS, ModelScorer
from phalanx.train.evaluate.scores import Scores
from phalanx.train.evaluate.text import needed_codec
from phalanx.train.parity.ranks import RankError, run_group
from phalanx.train.resume.parent import checkpoint_at

GROUP_SECONDS = 30 * 86_400.0  # that ranks wait for each other: an evaluation may be long


class ModelPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Which checkpoint to load, on which devices and how."""

    checkpoint: str
    device: str = "auto"  # auto, cpu or cuda
    dtype: str = "auto"  # auto: float32 on CPU, bfloat16 on CUDA
    ranks: int = 1  # processes on this machine
    tensor: int = 1  # of these, so many split each matrix; the others are replicas
    sequence: int = 0  # tokens that the model sees at most; 0: as its job trained on
    tokenizer: str = ""  # a tokenizer.json or its folder; "": that of the run's corpus
    rows: int = DEFAULT_ROWS  # texts that a replica computes at a time
    average: bool = False  # the moving average of the weights in their place


class GeneratedText(msgspec.Struct, frozen=True, kw_only=True):
    """A generated text and its prompt."""

    prompt: str
    text: str
    tokens: int


class EvaluationError(Exception):
    """A checkpoint cannot be evaluated; the message says why."""


Answer = TypeVar("Answer")
Work = Callable[[LoadedModel, LeadScorer], Answer]


def evaluate_checkpoint(place: ModelPlace, plan: EvaluationPlan) -> Scores:
    """Evaluate a checkpoint on this machine."""

    def work(loaded: LoadedModel, scorer: LeadScorer) -> Scores:
        evaluation = Evaluation(plan, loaded.codec, loaded.model.config.vocab)
        findings = evaluation.run(scorer)
        return Scores(
            checkpoint=loaded.checkpoint,
            step=loaded.step,
            average=place.average,
            scores=findings.scores,
            problems=findings.problems,
        )

    return _with_model(place, work, Scores)


def write_texts(place: ModelPlace, prompts: list[str], sampling: Sampling) -> list[GeneratedText]:
    """Generate texts after each prompt with a checkpoint's model."""

    def work(loaded: LoadedModel, scorer: LeadScorer) -> list[GeneratedText]:
        codec = needed_codec(loaded.codec, "text")
        tokens = [codec.encode(prompt, special=True) or [codec.start] for prompt in prompts]
        texts = scorer.generate(tokens, sampling)
        return [
            GeneratedText(prompt=prompt, text=codec.decode(text), tokens=len(text))
            for prompt, text in zip(prompts, texts, strict=True)
        ]

    return _with_model(place, work, list[GeneratedText])


class _RankResult(msgspec.Struct):
    """A rank's result or error."""

    answer: msgspec.Raw = msgspec.Raw(b"null")
    problem: str = ""


def _with_model(place: ModelPlace, work: Work[Answer], answer_type: type[Answer]) -> Answer:
    """Load the model on every rank; the first does the work and leads the others."""

    def on_rank() -> bytes:
        try:
            answer = _on_rank(place, work)
        except (ConfigError, CheckpointError, OSError) as error:
            return msgspec.json.encode(_RankResult(problem=str(error)))
        return msgspec.json.encode(_RankResult(answer=msgspec.Raw(msgspec.json.encode(answer))))

    if place.ranks % place.tensor:
        rule = f"does not divide the {place.ranks} ranks"
        raise EvaluationError(f"tensor = {place.tensor}: {rule}; take a divisor of them")
    if place.ranks == 1:
        encoded = on_rank()
    else:
        device = "cuda" if _on_cuda(place) else "cpu"
        try:
            encoded = run_group(place.ranks, on_rank, GROUP_SECONDS, device=device)[0]
        except RankError as error:
            raise EvaluationError(str(error)) from None
    result = msgspec.json.decode(encoded, type=_RankResult)
    if result.problem:
        raise EvaluationError(result.problem)
    return msgspec.json.decode(result.answer, type=answer_type)


def _on_rank(place: ModelPlace, work: Work[Answer]) -> Answer | None:
    """The work of one rank: returns the result on the first rank, None on the others."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = torch.device("cuda", rank) if _on_cuda(place) else torch.device("cpu")
    loaded = load_model(
        _find_checkpoint(place.checkpoint),
        _dtype(place, device),
        device,
        tensor=place.tensor,
        sequence=place.sequence,
        tokenizer=Path(place.tokenizer) if place.tokenizer else None,
        average=place.average,
    )
    scorer = ModelScorer(loaded, place.rows)
    if rank:
        follow(scorer, device)
        return None
    with leading(scorer, device) as lead:
        return work(loaded, lead)


def _find_checkpoint(where: str) -> Path | str:
    """Find a checkpoint: the one named, or the newest of a run or of all runs of a name."""
    if "://" in where:
        return where
    return checkpoint_at(Path(where))


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
