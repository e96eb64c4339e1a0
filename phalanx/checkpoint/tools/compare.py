"""What differs between two checkpoints, or between copies of a tensor within one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from torch import Tensor

from phalanx.checkpoint.format.manifest import Manifest
from phalanx.checkpoint.format.source import NamedSource, rng_of
from phalanx.checkpoint.format.tier import open_source
from phalanx.checkpoint.read.load import StoredTensors
from phalanx.checkpoint.read.parts import bits, parts

PLACE = ("step", "generation", "tokens", "cursor", "mesh", "run_ranks", "config_hash", "origin")

Report = Callable[[int], None]  # bytes done


class CheckpointDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor, or a word about the run, that is not the same in two checkpoints."""

    name: str
    what: str  # only in one, shape, type, or values
    tensor: bool = True
    elements: int = 0  # that differ
    greatest: float = 0.0  # absolute difference


def diff(one: str, other: str, report: Report) -> list[CheckpointDifference]:
    """What of two checkpoints is not equal to the bit: their place in a run, then tensors."""
    left_source, right_source = open_source(one), open_source(other)
    differences = list(_places(left_source, right_source))
    left, right = StoredTensors(left_source), StoredTensors(right_source)
    ours, theirs = left.tensors(), right.tensors()
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs or name not in ours:
            differences.append(
                CheckpointDifference(name=name, what=f"only in {one if name in ours else other}")
            )
        elif ours[name] != theirs[name]:
            (shape, dtype), (shape2, dtype2) = ours[name], theirs[name]
            what = f"{tuple(shape)} {dtype} against {tuple(shape2)} {dtype2}"
            differences.append(CheckpointDifference(name=name, what=what))
        elif different := _compare(name, left, right):
            differences.append(different)
        report(_bytes(ours.get(name) or theirs[name]))
    return differences


def _places(one: NamedSource, other: NamedSource) -> Iterator[CheckpointDifference]:
    """What the manifests say differently of the run; not when and into how many files it went."""
    left, right = _words(one.manifest), _words(other.manifest)
    for name in sorted(left.keys() | right.keys(), key=lambda name: (name.count("."), name)):
        ours, theirs = left.get(name, "nothing"), right.get(name, "nothing")
        if ours != theirs:
            yield CheckpointDifference(name=name, what=f"{ours} against {theirs}", tensor=False)
    ranks = one.manifest.run_ranks
    if ranks == other.manifest.run_ranks:
        dice = [rank for rank in range(ranks) if rng_of(one, rank) != rng_of(other, rank)]
        if dice:
            shown = ", ".join(map(str, dice[:5])) + (" …" if len(dice) > 5 else "")
            yield CheckpointDifference(
                name="random generators", what=f"of ranks {shown}", tensor=False
            )


def _words(manifest: Manifest) -> dict[str, Any]:
    words: dict[str, Any] = {name: getattr(manifest, name) for name in PLACE}
    return _flat(
        {"ranks" if n == "run_ranks" else n: msgspec.to_builtins(w) for n, w in words.items()}
        | {"config": manifest.config}
    )


def _flat(tree: dict[str, Any], before: str = "") -> dict[str, Any]:
    """A tree of settings by dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{before}{name}.")
        else:
            flat[before + name] = value
    return flat


def _bytes(kind: tuple[torch.Size, torch.dtype]) -> int:
    return kind[0].numel() * kind[1].itemsize


def _compare(name: str, left: StoredTensors, right: StoredTensors) -> CheckpointDifference | None:
    elements, greatest = 0, 0.0
    for a, b in zip(parts(left, name), parts(right, name), strict=True):
        if torch.equal(bits(a), bits(b)):
            continue
        elements += _unequal_elements(a, b)
        apart = (a.double() - b.double()).abs()
        apart = apart[~apart.isnan()]  # no number has a distance to another
        greatest = max(greatest, float(apart.max()) if apart.numel() else 0.0)
    if not elements:
        return None
    return CheckpointDifference(name=name, what="values", elements=elements, greatest=greatest)


def _unequal_elements(a: Tensor, b: Tensor) -> int:
    """By their bits: NaN is equal to itself, and 0 is not to -0."""
    unequal = (bits(a) != bits(b)).view(-1, a.element_size())
    return int(unequal.any(1).sum())
