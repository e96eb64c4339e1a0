"""What a job says of some of its parameters: another rate, another decay, or none of both."""

from __future__ import annotations

from typing import NamedTuple

import torch

from phalanx.config import ConfigError, Job, Optimizer, parameter_group
from phalanx.model import make_model, prepare_post_training
from phalanx.parallel import Weight


class UpdateRule(NamedTuple):
    """How one parameter is updated."""

    rate_factor: float
    weight_decay: float


def update_rule(weight: Weight, settings: Optimizer) -> UpdateRule:
    """By the first group that names it, else as it declares itself."""
    declared = weight.declaration.decay
    decays = weight.parameter.ndim > 1 if declared is None else declared
    decay = settings.weight_decay if decays else 0.0
    group = parameter_group(settings, weight.name)
    if group is None:
        return UpdateRule(1.0, decay)
    return UpdateRule(
        group.rate_factor, decay if group.weight_decay is None else group.weight_decay
    )


def refuse_unused_groups(job: Job) -> None:
    """Raise ``ConfigError`` for a group that no parameter belongs to."""
    if not job.optimizer.groups:
        return
    with torch.device("meta"):
        model = prepare_post_training(make_model(job.model), job)
        names = [name for name, _ in model.named_parameters()]
    used = {id(parameter_group(job.optimizer, name)) for name in names}
    for number, group in enumerate(job.optimizer.groups):
        if id(group) not in used:
            key = f"optimizer.groups[{number}].pattern"
            rule = "names no parameter that no group before it names"
            fix = f'parameters have names such as "{names[len(names) // 2]}"'
            raise ConfigError(key, f'"{group.pattern}"', rule, fix)
