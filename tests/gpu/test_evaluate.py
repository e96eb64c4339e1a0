"""Scores and text of a checkpoint on a real device are those of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.config import Window
from phalanx.train.evaluate.generate import Sampling, generate
from phalanx.train.evaluate.loaded import LoadedModel, load_model
from phalanx.train.evaluate.rows import ScoreRequest
from phalanx.train.evaluate.score import ModelScorer
from tests.train.evaluate.small_checkpoint import make_checkpoint, make_corpus

pytestmark = pytest.mark.gpu

FORMS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "windows": {"window": Window(size=8, full_every=2)},
    "sinks": {"attention_sinks": True, "window": Window(size=8)},
    "soft caps": {"attention_softcap": 20.0, "logit_softcap": 10.0},
}
REQUESTS = [ScoreRequest(tuple(range(1, 5 + n)), 3) for n in range(0, 20, 3)]


def opened(checkpoint: Path, device: str, dtype: torch.dtype) -> LoadedModel:
    return load_model(checkpoint, dtype, torch.device(device))


@pytest.mark.parametrize("form", FORMS)
def test_likelihoods_and_texts_are_those_of_the_cpu(form: str, tmp_path: Path) -> None:
    shape = {"dim": 128, "heads": 4, "kv_heads": 2, "head_dim": 32}
    checkpoint = make_checkpoint(tmp_path, make_corpus(tmp_path), **shape, **FORMS[form])
    here, there = (opened(checkpoint, device, torch.float32) for device in ("cpu", "cuda"))
    expected = [each.log_probability for each in ModelScorer(here).score(REQUESTS)]
    found = [each.log_probability for each in ModelScorer(there).score(REQUESTS)]
    assert found == pytest.approx(expected, abs=1e-2)
    prompts, sampling = [[5, 6, 7], [9]], Sampling(most_tokens=6)
    texts = [generate(loaded, prompts, sampling) for loaded in (here, there)]
    assert texts[0] == texts[1]
    low = opened(checkpoint, "cuda", torch.bfloat16)
    rough = [each.log_probability for each in ModelScorer(low).score(REQUESTS)]
    assert rough == pytest.approx(expected, rel=0.05, abs=0.5)
    assert generate(low, prompts, Sampling(most_tokens=6, temperature=1.0)) != []
