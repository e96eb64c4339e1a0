"""What ``phalanx parity`` prints: a line a mesh, a matrix of checkpoints, the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from phalanx.cli.tables import plain

if TYPE_CHECKING:
    from phalanx.train.parity.prove import MeshComparison

SAME, DIFFERS, REFUSED = "same", "DIFFERS", "refused"


def print_comparison(comparison: MeshComparison) -> None:
    """One mesh."""
    head = f"{comparison.mesh:26} {comparison.ranks:2} ranks  {verdict(comparison):8}"
    if comparison.refused or comparison.error:
        print(f"{head} {plain(comparison.refused or comparison.error)}", flush=True)
        return
    numbers = (
        f"loss {comparison.loss:.1e}  norm {comparison.grad_norm:.1e}  "
        f"weights {comparison.weights:.1e}"
    )
    where = f"  most in {plain(comparison.parameter)}" if comparison.differs else ""
    print(f"{head} {numbers}{where}", flush=True)


def print_reshards(comparisons: Sequence[MeshComparison]) -> None:
    """Checkpoints: a row for the mesh that saved, a column for the one that went on."""
    if not comparisons:
        return
    meshes = list(dict.fromkeys(one.mesh for one in comparisons))
    same = {(one.source, one.mesh): one.same for one in comparisons}
    print("\ncheckpoint of … continues on …")
    print(f"{'':26} {' '.join(f'{number:3}' for number in range(1, len(meshes) + 1))}")
    for number, source in enumerate(meshes, 1):
        cells = ("  =" if same.get((source, mesh)) else "  X" for mesh in meshes)
        print(f"{number:3} {source:22} {' '.join(cells)}")
    for one in comparisons:
        if one.differs:
            print(f"{one.source} → {one.mesh}: {_difference(one)}")


def print_verdict(comparisons: Sequence[MeshComparison]) -> None:
    """How many are which."""
    meshes = [one for one in comparisons if not one.source]
    counts = dict.fromkeys((SAME, DIFFERS, REFUSED), 0)
    for one in meshes:
        counts[verdict(one)] += 1
    text = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    ways = [one for one in comparisons if one.source]
    moved = f"; checkpoints: {sum(one.same for one in ways)} of {len(ways)} ways same"
    print(f"\n{len(meshes)} meshes: {text}{moved if ways else ''}")


def verdict(found: MeshComparison) -> str:
    """In a word."""
    return REFUSED if found.refused else SAME if found.same else DIFFERS


def _difference(comparison: MeshComparison) -> str:
    if comparison.error:
        return plain(comparison.error)
    numbers = (
        f"loss {comparison.loss:.1e}, norm {comparison.grad_norm:.1e}, "
        f"weights {comparison.weights:.1e}"
    )
    return f"{numbers}, most in {plain(comparison.parameter)}"
