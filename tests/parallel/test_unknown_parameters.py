"""A parameter that an axis was not told of is refused by its name, before it trains wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from phalanx.config import Job
from phalanx.model import Block, Experts
from phalanx.parallel import build_mesh
from phalanx.parallel.collectives import UnknownParameterError
from phalanx.parallel.dryrun import pretended_group
from phalanx.parallel.engine import build_parts
from tests.parallel.test_parity import MODELS, make_job
from tests.ranks import run_alone

Grow = Callable[[Any], None]


def add_to_block(block: Any) -> None:
    block.scale = nn.Parameter(torch.empty(4))


def add_to_attention(block: Any) -> None:
    block.attention.gate = nn.Linear(8, 8, bias=False)


def add_a_bias(block: Any) -> None:
    block.attention.out.bias = nn.Parameter(torch.empty(8))


def add_to_router(block: Any) -> None:
    if block.moe is not None:
        block.moe.router.bias = nn.Parameter(torch.empty(4))


def add_to_experts(experts: Any) -> None:
    experts.scale = nn.Parameter(torch.empty(4))


def refused(job: Job, grown: type, grow: Grow) -> str:
    """What is said of a model whose blocks or experts have one parameter more."""
    made = grown.__init__

    def init(self: Any, *args: Any) -> None:
        made(self, *args)
        grow(self)

    grown.__init__ = init  # type: ignore[misc]
    with pretended_group(0, 2):
        try:
            build_parts(job, build_mesh(job, torch.device("cpu")))
        except UnknownParameterError as error:
            return str(error)
        finally:
            grown.__init__ = made  # type: ignore[misc]
    return ""


CASES: dict[str, tuple[str, dict[str, int], type, Grow, str]] = {
    "block": ("dense", {"tensor": 2}, Block, add_to_block, "layers.0.scale"),
    "linear": ("dense", {"tensor": 2}, Block, add_to_attention, "layers.1.attention.gate.weight"),
    "bias": ("latent", {"tensor": 2}, Block, add_a_bias, "layers.1.attention.out.bias"),
    "router": ("moe", {"tensor": 2}, Block, add_to_router, "layers.2.moe.router.bias"),
    "experts": ("moe", {"expert": 2}, Experts, add_to_experts, "moe.experts.scale"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_new_parameter_is_refused_by_name(name: str) -> None:
    model, parallel, grown, grow, parameter = CASES[name]
    job = make_job(2, {"model": MODELS[model], "parallel": parallel})
    said = run_alone(refused, job, grown, grow)
    assert parameter in said and f"parallel.{next(iter(parallel))} = 1" in said


@pytest.mark.parametrize("model", [name for name in MODELS if name != "olmo"])
def test_every_parameter_of_our_models_is_known(model: str) -> None:
    """But of the model whose norm over all heads no tensor-parallel rank can take."""
    for parallel in ({"tensor": 2}, *([{"expert": 2}] if "moe" in model else [])):
        job = make_job(2, {"model": MODELS[model], "parallel": parallel})
        assert run_alone(refused, job, Block, lambda _: None) == ""
