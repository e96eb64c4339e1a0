"""Families of published models on meshes: each pair trains as one process does, or is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import cache

import pytest
from msgspec import structs

from docs.generator.parity import (
    EXPERT_MESHES,
    FAMILIES,
    MESHES,
    FamilyProof,
    meshes_of,
    read,
    record,
)
from phalanx.config import Job, job_from_table
from phalanx.train.parity.meshes import Candidate, candidates, on_one_process
from phalanx.train.parity.prove import (
    MeshComparison,
    Reference,
    compare,
    make_reference,
    prove,
)
from phalanx.train.parity.shrink import shrunken
from proof.history import this_commit

RANKS = 4
LEAST_FAMILIES, LEAST_MESHES = 10, 12
SMALL_MESHES = (*MESHES[:10], *EXPERT_MESHES[:2])  # of two ranks
DEEP_MESHES = ("pp2-interleaved", "pp2-zero-bubble")  # two stages a rank, and a layer for each


def job_of(family: str) -> Job:
    preset, *others = (f"model.{key}={value}" for key, value in FAMILIES[family].items())
    return job_from_table({"train": {"device": "cpu"}}, [preset, *others])


@cache
def small(family: str, layers: int) -> tuple[dict[str, Candidate], Reference]:
    """A family's meshes of two ranks, and what one process comes to in a step."""
    job = shrunken(job_of(family), 2)
    job = structs.replace(job, model=structs.replace(job.model, layers=layers))
    meshes = {mesh.name: mesh for mesh in candidates(job, 2)}
    return meshes, make_reference(on_one_process(job), 1)


# A sixth of all pairs: every third one of two ranks, other ones from family to family.
SIXTH = [
    (family, mesh)
    for turn, family in enumerate(FAMILIES)
    for mesh in SMALL_MESHES[turn % 3 :: 3]
    if mesh in meshes_of(family)
]


@pytest.mark.parametrize(("family", "mesh"), SIXTH)
def test_a_mesh_trains_a_family_as_one_process_does_or_is_refused(family: str, mesh: str) -> None:
    meshes, reference = small(family, 4 if mesh in DEEP_MESHES else 2)
    found = compare(meshes[mesh], reference, 1)
    assert not found.differs, found
    assert found.refused == read()[family].meshes[mesh]  # as the page says


def test_the_matrix_is_whole() -> None:
    assert len(FAMILIES) >= LEAST_FAMILIES
    assert len(SIXTH) * 6 >= sum(len(meshes_of(family)) for family in FAMILIES)
    assert {mesh for _, mesh in SIXTH} == {*SMALL_MESHES}
    proofs = read()
    assert list(proofs) == list(FAMILIES)
    for family, proof in proofs.items():
        assert tuple(proof.meshes) == meshes_of(family) and len(proof.meshes) >= LEAST_MESHES
        proved = sum(not rule for rule in proof.meshes.values())
        assert proof.reshards in (0, proved**2)


@pytest.fixture(scope="module")
def page() -> Iterator[None]:
    """Written anew from what is stored."""
    yield
    subprocess.run([sys.executable, "-m", "docs.generator"], check=True)


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES)
def test_every_mesh_of_a_family_is_proved_or_refused_and_continues_every_other_s_checkpoint(
    family: str, page: None
) -> None:
    steps, names = 3, meshes_of(family)
    found = prove(job_of(family), RANKS, steps, reshard=True, seen=lambda _: None, only=names)
    assert [one for one in found if one.differs] == []
    record(family, summed_up(found, steps, names))


def summed_up(found: Sequence[MeshComparison], steps: int, names: Sequence[str]) -> FamilyProof:
    rules = {one.mesh: one.refused for one in found if not one.source}
    return FamilyProof(
        date=datetime.now(UTC).date().isoformat(),
        commit=this_commit(),
        steps=steps,
        meshes={name: rules[name] for name in names},
        reshards=sum(bool(one.source) for one in found),
        loss=max(one.loss for one in found),
        grad_norm=max(one.grad_norm for one in found),
        weights=max(one.weights for one in found),
    )
