"""QK-clip: heads above the limit come down to it, all others keep every bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.train.parity.prove import make_trainer
from phalanx.train.trainer import Trainer
from tests.parallel.test_parity import MODELS, make_job

KEPT, SKIPPED = torch.tensor(False), torch.tensor(True)
FORMS: dict[str, dict[str, Any]] = {
    "grouped": {"heads": 4, "kv_heads": 2},
    "one-key-a-head": {"heads": 4, "kv_heads": 4},
    "biases": {"heads": 4, "kv_heads": 2, "attention_bias": True},
    "window-and-sinks": {"kv_heads": 2, "window": {"size": 8}, "attention_sinks": True},
    "latent": MODELS["latent"],
}


def make(model: dict[str, Any], limit: float, **sections: Any) -> Trainer:
    """One layer, whose input no clipping changes."""
    one = {**model, "layers": 1, "qk_clip": limit}
    return make_trainer(make_job(1, {"model": one, **sections}))


def peaks_of(trainer: Trainer) -> Tensor:
    """The largest scores of one batch, which count from here on."""
    batches = trainer.feed.next(trainer.cursor)
    (layer,) = trainer.qk_clip._layers
    layer.peaks.peaks.zero_()
    trainer.engine.run(batches.micro_batches, torch.ones(()), trainer.timer)
    trainer.engine.clear_gradients()
    return layer.peaks.peaks.clone()


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    return {weight.name: weight.master.clone() for weight in trainer.engine.weights}


@pytest.mark.parametrize("form", FORMS)
def test_heads_above_the_limit_come_down_to_it_and_others_stay(form: str) -> None:
    before = peaks_of(make(FORMS[form], 1.0))
    limit = float(before.median())
    trainer = make(FORMS[form], limit)
    assert torch.equal(peaks_of(trainer), before)
    trainer.qk_clip.apply(KEPT)
    after = peaks_of(trainer)
    assert (before > 1.001 * limit).any() and (before < limit).any()
    torch.testing.assert_close(after, before.clamp(max=limit), rtol=1e-4, atol=0)
    trainer.close()


def test_only_queries_and_keys_change() -> None:
    trainer = make(FORMS["grouped"], 1e-6)
    peaks_of(trainer)
    before = state_of(trainer)
    trainer.qk_clip.apply(KEPT)
    changed = {n for n, value in state_of(trainer).items() if not torch.equal(value, before[n])}
    assert changed == {"layers.0.attention.qkv.weight"}
    heads = {name: t.view(2, 4, 8, 32) for name, t in state_of(trainer).items() if name in changed}
    values = before["layers.0.attention.qkv.weight"].view(2, 4, 8, 32)[:, 3]
    assert torch.equal(heads["layers.0.attention.qkv.weight"][:, 3], values)


@pytest.mark.parametrize("why", ["skipped", "infinite", "not-a-number", "within", "frozen"])
def test_weights_keep_every_bit(why: str) -> None:
    groups = {"groups": [{"pattern": "*.qkv.weight", "freeze": True}]}
    limit = 100.0 if why == "within" else 1e-6
    trainer = make(FORMS["grouped"], limit, **({"optimizer": groups} if why == "frozen" else {}))
    if why == "frozen":
        assert trainer.qk_clip._layers == []
    else:
        peaks_of(trainer)
        bad = {"infinite": torch.inf, "not-a-number": torch.nan}.get(why)
        if bad is not None:
            trainer.qk_clip._layers[0].peaks.peaks.fill_(bad)
    before = state_of(trainer)
    trainer.qk_clip.apply(SKIPPED if why == "skipped" else KEPT)
    assert all(torch.equal(value, before[name]) for name, value in state_of(trainer).items())
    trainer.close()


def test_a_step_begins_with_no_peaks_and_validation_counts_none() -> None:
    sections = {"data": {"validation_fraction": 0.5}, "train": {"validate_samples": 4}}
    trainer = make(FORMS["grouped"], 1e-6, **sections)
    (layer,) = trainer.qk_clip._layers
    trainer.train_step()
    assert layer.peaks.peaks.count_nonzero() == 0
    trainer.validate()
    assert layer.peaks.peaks.count_nonzero() == 0
    trainer.close()


def test_padding_does_not_count() -> None:
    """A batch of 3 in micro-batches of 2 has a sample that only fills up."""
    train = {"global_batch": 3, "micro_batch": 1}
    exact = peaks_of(make(FORMS["grouped"], 1.0, train=train))
    padded = make(FORMS["grouped"], 1.0, train={**train, "micro_batch": 2})
    torch.testing.assert_close(peaks_of(padded), exact)
