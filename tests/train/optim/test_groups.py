"""Groups of parameters: another rate, another decay, or frozen, on every mesh alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx.config import ConfigError, Optimizer, ParameterGroup
from phalanx.train.optim.groups import update_rule
from phalanx.train.optim.guard import squared_norm
from phalanx.train.optim.optimizer import build_optimizer
from phalanx.train.parity.prove import make_steps, make_trainer, train
from tests.parallel.test_parity import make_job
from tests.ranks import run_ranks
from tests.train.optim.test_optimizer import set_gradients, verdict, weights

GROUPS = (
    ParameterGroup(pattern="embed.*", freeze=True),
    ParameterGroup(pattern="*.qkv.weight", rate_factor=0.5, weight_decay=0.0),
    ParameterGroup(pattern="layers.*", weight_decay=0.3),
)


def test_the_first_group_that_fits_counts() -> None:
    settings = Optimizer(groups=GROUPS, weight_decay=0.1)
    rules = {weight.name: update_rule(weight, settings) for weight in weights()}
    assert rules["layers.0.attention.qkv.weight"] == (0.5, 0.0)
    assert rules["layers.0.mlp.down.weight"] == (1.0, 0.3)
    assert rules["embed.weight"] == (1.0, 0.1)
    plain = {weight.name: update_rule(weight, Optimizer()) for weight in weights()}
    assert plain["layers.0.mlp_norm.weight"] == (1.0, 0.0)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_frozen_parameter_stays_and_does_not_count_in_the_norm(kind: str) -> None:
    found = weights()
    found[0].frozen = found[1].frozen = True  # the embedding, and one of Muon's matrices
    before = [weight.master.clone() for weight in found]
    optimizer = build_optimizer(found, Optimizer(kind=kind), offload=False)  # type: ignore[arg-type]
    set_gradients(found, 0)
    optimizer.step(0.01, verdict())
    same = [torch.equal(w.master, was) for w, was in zip(found, before, strict=True)]
    assert same == [True, True, *[False] * (len(found) - 2)]
    counted = [weight.parameter.grad for weight in found[2:]]
    expected = sum(grad.square().sum().item() for grad in counted if grad is not None)
    assert squared_norm(found).item() == pytest.approx(expected)
    assert squared_norm(found[:2]).item() == 0.0


def grouped_job(ranks: int, parallel: dict[str, Any]) -> Any:
    groups = [
        {"pattern": "embed.*", "freeze": True},
        {"pattern": "layers.*.attention.*", "rate_factor": 0.25},
    ]
    sections = {"model": {"layers": 2}, "optimizer": {"groups": groups}, "parallel": parallel}
    return make_job(ranks, {**sections, "train": {"steps": 3, "micro_batch": 2}})


def test_groups_train_alike_where_layers_and_matrices_are_split() -> None:
    alone = train(grouped_job(1, {}))
    for parallel in ({"pipeline": 2}, {"tensor": 2}):
        for found in run_ranks(2, train, grouped_job(2, parallel)):
            for step, expected in zip(found, alone, strict=True):
                assert step == pytest.approx(expected, rel=1e-5)


def test_a_frozen_embedding_is_what_it_was() -> None:
    trainer = make_trainer(grouped_job(1, {}))
    before = {w.name: w.master.clone() for w in trainer.engine.weights}
    make_steps(trainer, 2)
    trainer.close()
    frozen = {w.name for w in trainer.engine.weights if torch.equal(w.master, before[w.name])}
    assert frozen == {"embed.weight"}


def test_a_group_that_names_nothing_is_refused() -> None:
    job = make_job(1, {"optimizer": {"groups": [{"pattern": "layer.*"}]}})
    with pytest.raises(ConfigError, match=r"optimizer\.groups\[0\]\.pattern"):
        make_trainer(job)
