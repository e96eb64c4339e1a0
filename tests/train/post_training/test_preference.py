"""Preferences are learned on every mesh as on one process, and rewards are recorded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from phalanx.config import Job
from phalanx.data.chat.encode import ChatEncoder
from phalanx.data.chat.run import ChatOptions, prepare_chat
from phalanx.model.post_training.preference import pair_loss_of
from phalanx.train.evaluate.rows import ScoreRequest
from phalanx.train.evaluate.score import GangScorer
from phalanx.train.exits import ExitCode
from phalanx.train.parity.prove import (
    LOSS_TOLERANCE,
    NORM_TOLERANCE,
    make_steps,
    make_trainer,
    train,
)
from tests.data.chat.chats import write_lines, write_tokenizer
from tests.parallel.test_parity import make_job, train_alone
from tests.shared_ranks import SharedRanks
from tests.train.forked_runs import Run, start

__all__ = ["start"]

SEQUENCE = 64


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("pairs")
    records = [
        {
            "prompt": [{"role": "user", "content": f"{number}?"}],
            "chosen": [{"role": "assistant", "content": "hello to you"}],
            "rejected": [{"role": "assistant", "content": "no" * (1 + number % 3)}],
        }
        for number in range(60)
    ]
    lines = write_lines(home / "pairs.jsonl", records)
    encoder = ChatEncoder(write_tokenizer(home / "tokenizer"))
    options = ChatOptions(sequence=SEQUENCE, pairs=True)
    prepare_chat([lines], encoder, home / "corpus", options)
    return home / "corpus"


def job_of(corpus: Path, ranks: int = 1, **sections: dict[str, Any]) -> Job:
    return make_job(
        ranks,
        {
            "model": {"layers": 2, "vocab": 320},
            "data": {
                "source": "shards",
                "path": str(corpus),
                "sequence": SEQUENCE,
                "pairs": True,
                "document_mask": True,
                "validation_fraction": 0.2,
            },
            "adapter": {"kind": "lora", "rank": 4},
            "preference": {"kind": "dpo", "beta": 0.5},
            "optimizer": {"learning_rate": 1e-2},
            "train": {"micro_batch": 2, "validate_samples": 4},
            **sections,
        },
    )


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [(2, {"zero": 0}), (2, {"zero": 3}), (2, {"tensor": 2}), (3, {"zero": 2})],
    ids=str,
)
def test_a_mesh_learns_preferences_like_one_process(
    corpus: Path, ranks: int, parallel: dict[str, Any], shared_ranks: SharedRanks
) -> None:
    reference = train_alone(job_of(corpus))
    assert reference[0][0] == pytest.approx(0.6931, abs=1e-3)
    assert reference[2][0] < reference[0][0]
    for found in shared_ranks.run(ranks, train, job_of(corpus, ranks, parallel=parallel)):
        for (loss, norm), (expected_loss, expected_norm) in zip(found, reference, strict=True):
            assert loss == pytest.approx(expected_loss, rel=LOSS_TOLERANCE)
            assert norm == pytest.approx(expected_norm, rel=NORM_TOLERANCE)


def test_a_validation_is_the_mean_over_held_out_pairs(corpus: Path) -> None:
    trainer = make_trainer(job_of(corpus))
    assert trainer.validate() == pytest.approx(0.6931, abs=1e-3)
    trainer.close()


def test_texts_are_scored_by_the_model_that_learns(corpus: Path) -> None:
    trainer = make_trainer(job_of(corpus))
    make_steps(trainer, 2)
    texts = [ScoreRequest(tuple(range(3, 3 + count)), count - 1) for count in (5, 9)]
    (part,) = trainer.engine.parts
    found = GangScorer(trainer.engine).score(texts)
    for text, score in zip(texts, found, strict=True):
        part.prepare(torch.arange(len(text.tokens)))
        tokens = torch.tensor([text.tokens])
        with torch.no_grad():
            chances = part(tokens)[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])
        assert score.log_probability == pytest.approx(chances.sum().item(), rel=1e-5)
    trainer.close()


def pairs_noted(job: Job) -> list[float]:
    """After a step, and after a micro-batch of it was computed once more to be verified."""
    trainer, noted = make_trainer(job), []
    batch, weight = trainer.feed.next(trainer.cursor).micro_batches[0], torch.ones(())
    make_steps(trainer, 1)
    (loss,) = filter(None, map(pair_loss_of, trainer.engine.parts))
    noted.append(loss.take_sums(trainer.device).pairs.item())
    trainer.engine.recompute(batch, weight)
    noted.append(loss.take_sums(trainer.device).pairs.item())
    trainer.close()
    return noted


def test_a_verification_counts_no_pair_again(corpus: Path, shared_ranks: SharedRanks) -> None:
    for step, again in shared_ranks.run(2, pairs_noted, job_of(corpus, 2)):
        assert step > 0 and again == 0


def test_a_run_records_rewards(corpus: Path, tmp_path: Path, start: Callable[..., Run]) -> None:
    job = job_of(corpus, 2, train={"steps": 4, "micro_batch": 2}, log={"every": 2})
    job = msgspec.structs.replace(job, runs=str(tmp_path))
    run = start(job)
    assert run.wait() == ExitCode.DONE, run.text
    lines = [
        json.loads(each) for each in (run.folder.metrics / "own.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == [2, 4]
    first, last = lines
    for line in lines:
        assert line["rewards/margins"] == pytest.approx(
            line["rewards/chosen"] - line["rewards/rejected"], abs=1e-6
        )
    assert last["rewards/margins"] > first["rewards/margins"] > 0
    assert last["rewards/accuracies"] == 1.0
