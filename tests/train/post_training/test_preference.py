"""Preferences are learned on every mesh as on one process, and rewards are recorded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from phalanx.config import Job
from phalanx.data.chat.encode import ChatEncoder
from phalanx.data.chat.run import ChatOptions, prepare_chat
from phalanx.train.exits import ExitCode
from phalanx.train.parity.prove import LOSS_TOLERANCE, NORM_TOLERANCE, make_trainer, train
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
