"""Promotion of a model: check its gate, change its stage, notify the webhook."""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct, structs

from phalanx.cluster.pipelines.conditions import judge, parse_condition
from phalanx.pipelines.registry.models import (
    ModelRegistry,
    ModelStage,
    ModelVersion,
    Promotion,
    RegistryError,
)
from phalanx.train.exits import now

MODEL = "model"  # in the place of a step: metrics of a gate here are all the model's


class Promoted(Struct, frozen=True):
    """The result of a promotion."""

    model: ModelVersion
    told: str = ""  # why the webhook was not taken; "": it was, or there is none


def check_gate(model: ModelVersion, gate: Sequence[str], registry: ModelRegistry) -> list[str]:
    """Check a promotion's conditions, one sentence each; RegistryError if one does not hold."""
    before = registry.released(model.name)
    reasons = []
    for text in gate:
        try:
            condition = structs.replace(parse_condition(f"{MODEL}.{text}"), text=text)
        except ValueError:
            hint = '"loss <= 3.2", or "loss <= released + 0.5 %"'
            raise RegistryError(f"--gate {text!r} is not a condition; example: {hint}") from None
        metric = condition.name.metric
        if metric not in model.scores:
            known = ", ".join(model.scores) or "none"
            rule = f"has no score {metric} (it has: {known})"
            raise RegistryError(f"{model.name} {model.version} {rule}")
        judgement = judge(
            condition, {model.name: model.scores[metric]}, before.scores if before else {}
        )
        if not judgement.holds:
            raise RegistryError(
                f"{model.name} {model.version} stays {model.stage}: {judgement.reason}"
            )
        reasons.append(judgement.reason)
    return reasons


def promote(
    registry: ModelRegistry,
    model: ModelVersion,
    stage: ModelStage,
    gate: Sequence[str] = (),
    webhook: str = "",
    post: Callable[[str, bytes], str] = lambda url, data: "",
) -> Promoted:
    """Move a model to a stage if its gate allows it, and notify the webhook."""
    reasons = check_gate(model, gate, registry)
    made = registry.change_stage(
        model, Promotion(time=now(), who=who(), stage=stage, reason="; ".join(reasons))
    )
    told = post(webhook, msgspec.json.encode({"kind": "model", "model": made})) if webhook else ""
    return Promoted(made, told)


def who() -> str:
    """The user who runs this process."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        return str(os.getuid())
