"""Which checkpoints a word on the command line of ``phalanx ckpt`` means."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.checkpoint.format.tier import Tier


def prunable(where: str) -> list[Tier]:
    """The folders at a place that hold complete checkpoints."""
    from phalanx.checkpoint import CheckpointError
    from phalanx.checkpoint.tools.inspect import find

    checkpoints = list(find(where))
    if len(checkpoints) == 1 and at(*checkpoints[0]).rstrip("/") == where.rstrip("/"):
        fix = f"name its folder, {checkpoints[0][0].where}, or remove it by hand"
        raise CheckpointError(where, "is one checkpoint, and rules need several", fix)
    tiers = {tier.where: tier for tier, _ in checkpoints}
    complete = [tier for tier in tiers.values() if tier.names()]
    if not complete:
        raise no_checkpoint(where)
    return complete


def newest(checkpoints: list[tuple[Tier, str]], where: str) -> tuple[Tier, str]:
    """Of what was found the last complete one, of those not known to be bad if there are any."""
    from phalanx.checkpoint.format.manifest import MANIFEST_FILE
    from phalanx.checkpoint.format.tier import BAD_FILE, step_of

    complete = [one for one in checkpoints if MANIFEST_FILE in one[0].files(one[1])]
    named = [one for one in complete if step_of(one[1]) >= 0] or complete
    good = [one for one in named if BAD_FILE not in one[0].files(one[1])] or named
    if not good:
        raise no_checkpoint(where)
    return good[-1]


def at(tier: Tier, name: str) -> str:
    return f"{tier.where}/{name}"


def refuse_missing(folder: Path) -> None:
    """Say so where there is no folder to import."""
    from phalanx.checkpoint import CheckpointError

    if not folder.is_dir():
        problem = "is no folder" if folder.exists() else "there is no such folder"
        fix = "name one with config.json and *.safetensors, or with DCP's .metadata"
        raise CheckpointError(folder, problem, fix)


def no_checkpoint(where: str) -> Exception:
    from phalanx.checkpoint import CheckpointError

    return CheckpointError(where, "there is no complete checkpoint", "phalanx ckpt ls lists them")
