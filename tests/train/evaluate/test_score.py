"""Likelihoods are those of the logits, whoever computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.config import Job, check, job_from_table, resolve
from phalanx.parallel import Engine, build_mesh
from phalanx.train.evaluate.loaded import LoadedModel
from phalanx.train.evaluate.rows import ScoreRequest, TokenScore
from phalanx.train.evaluate.score import GangScorer, ModelScorer
from tests.shared_ranks import SharedRanks
from tests.train.evaluate.small_checkpoint import make_checkpoint, opened

CPU = torch.device("cpu")


def requests(vocab: int, lengths: tuple[int, ...] = (3, 17, 9, 20, 2)) -> list[ScoreRequest]:
    chance = torch.Generator().manual_seed(5)
    texts = [torch.randint(0, vocab, (n,), generator=chance).tolist() for n in lengths]
    return [ScoreRequest(tuple(text), 1 + len(text) // 3) for text in texts]


def by_logits(loaded: LoadedModel, asked: ScoreRequest) -> TokenScore:
    """The textbook: all logits of one text, unpadded."""
    tokens = torch.tensor(asked.tokens)
    loaded.model.prepare(torch.arange(len(tokens) - 1))
    with torch.no_grad():
        logits = loaded.model(tokens[None, :-1])[0, -asked.scored :]
    labels = tokens[-asked.scored :]
    chosen = logits.log_softmax(-1).gather(1, labels[:, None])
    return TokenScore(float(chosen.sum()), bool((logits.argmax(-1) == labels).all()))


def likeliest(loaded: LoadedModel) -> ScoreRequest:
    """A text whose end a model would write itself."""
    text = [5, 6, 7]
    for _ in range(3):
        loaded.model.prepare(torch.arange(len(text)))
        with torch.no_grad():
            text.append(int(loaded.model(torch.tensor([text]))[0, -1].argmax()))
    return ScoreRequest(tuple(text), 3)


def assert_same(found: list[TokenScore], expected: list[TokenScore]) -> None:
    assert [each.greedy for each in found] == [each.greedy for each in expected]
    values = [each.log_probability for each in expected]
    assert [each.log_probability for each in found] == pytest.approx(values, abs=2e-5)


@pytest.mark.parametrize("fields", [{}, {"logit_softcap": 2.0, "tied_embedding": True}])
def test_a_loaded_model_scores_as_its_logits_do(
    tmp_path: Path, corpus: Path, fields: dict[str, Any]
) -> None:
    loaded = opened(make_checkpoint(tmp_path, corpus, **fields))
    asked = [*requests(300), likeliest(loaded)]
    expected = [by_logits(loaded, each) for each in asked]
    assert expected[-1].greedy and not expected[0].greedy
    assert_same(ModelScorer(loaded, rows=2).score(asked), expected)
    assert loaded.model.head is not None and not loaded.model.head.scores_rows


def score_split(checkpoint: Path, tensor: int) -> list[TokenScore]:
    loaded = opened(checkpoint, tensor=tensor)
    return ModelScorer(loaded, rows=2).score([*requests(300), requests(300)[0]])


@pytest.mark.parametrize(("ranks", "tensor"), [(2, 2), (2, 1), (4, 2)])
def test_ranks_that_split_a_model_or_the_requests_find_the_same(
    checkpoint: Path, ranks: int, tensor: int, shared_ranks: SharedRanks
) -> None:
    expected = score_split(checkpoint, 1)
    for found in shared_ranks.run(ranks, score_split, checkpoint, tensor):
        assert_same(found, expected)


MESHES: dict[str, dict[str, Any]] = {
    "zero 3": {},
    "replicas": {"zero": 0},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
    "ring": {"context": 2, "context_method": "ring"},
    "ulysses": {"context": 2, "context_method": "ulysses"},
    "tensor and pipeline": {"tensor": 2, "pipeline": 2},
}


def gang_job(ranks: int, parallel: dict[str, Any]) -> Job:
    table = {
        "model": {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 4, "ffn": 64, "vocab": 64},
        "data": {"sequence": 32, "prefetch": 0},
        "precision": {"compute": "float32"},
        "train": {"steps": 1, "global_batch": 8, "micro_batch": 2, "device": "cpu"},
        "parallel": parallel,
    }
    job = resolve(job_from_table(table), ranks)
    check(job, ranks)
    return job


def score_in_gang(job: Job) -> list[TokenScore]:
    engine = Engine(job, build_mesh(job, CPU))
    tables = [part.cos for part in engine.parts]
    found = GangScorer(engine).score(requests(64))
    assert all(part.cos is table for part, table in zip(engine.parts, tables, strict=True))
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_a_gang_scores_on_every_mesh_as_one_process_does(
    mesh: str, shared_ranks: SharedRanks
) -> None:
    expected = score_in_gang(gang_job(1, {}))
    ranks = 4 if " and " in mesh else 2
    for found in shared_ranks.run(ranks, score_in_gang, gang_job(ranks, MESHES[mesh])):
        assert_same(found, expected)
