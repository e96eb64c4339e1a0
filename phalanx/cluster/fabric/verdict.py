"""What passes between the core and the nodes of a fabric check: its job's payload, its verdict."""

from __future__ import annotations

import msgspec
from msgspec import Struct, structs

MOST_FINDINGS, MOST_TEXT = 16, 300
MOST_PLACES_BYTES = 60_000  # arguments of programs have an end


class FabricCheckWork(
    Struct,
    frozen=True,
    kw_only=True,
    tag_field="kind",
    tag="FabricCheck",
    forbid_unknown_fields=True,
):
    """The payload of a check's job: what its nodes measure."""

    ranks_per_node: int
    slower_ppm: int  # of the usual rate that a slow part lacks
    places: dict[str, tuple[str, str]] = {}  # leaf and pod by node


class FabricFinding(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that is slow; ``nodes``: whose fault it may be."""

    text: str
    nodes: tuple[str, ...] = ()


class FabricVerdict(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a check found, as its program leaves it as its result."""

    findings: tuple[FabricFinding, ...] = ()
    unclear: str = ""  # why nothing can be told; "": it can


def encode_work(work: FabricCheckWork) -> str:
    """The payload as it stands in a JobSpec; places of very many nodes are left out."""
    if len(msgspec.json.encode(work.places)) > MOST_PLACES_BYTES:
        work = structs.replace(work, places={})
    return msgspec.json.encode(work).decode()


def decode_verdict(text: str) -> FabricVerdict:
    """What a program left, cut to a size that people read; a MsgspecError where it is none."""
    verdict = msgspec.json.decode(text, type=FabricVerdict)
    findings = tuple(
        FabricFinding(text=_shown(one.text), nodes=one.nodes)
        for one in verdict.findings[:MOST_FINDINGS]
    )
    return FabricVerdict(findings=findings, unclear=_shown(verdict.unclear))


def _shown(text: str) -> str:
    return "".join(letter for letter in text[:MOST_TEXT] if letter.isprintable())
