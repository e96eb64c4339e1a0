"""What is known of the software behind a row: from its columns, or as its source says in prose.

``data/sources.toml`` puts the prose of known sources into columns. A row whose software is named
nowhere gets typical traits and counts as unnamed.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib import resources
from typing import Literal

from msgspec import Struct, convert

from phalanx.config import ConfigError
from phalanx.plan.evidence.fields import SkippedRowError
from phalanx.plan.stacks import STACKS, TRAITS, typical_software, with_traits
from phalanx.plan.workload import ROUTING_SKEW, Mapping, Software

UNKNOWN_STACK = "stack is not one that is known; its traits are taken as typical"


class SourceFact(Struct, frozen=True, forbid_unknown_fields=True):
    """Columns of every row whose cells match the patterns."""

    set: dict[str, str]
    source: str = ""
    model: str = ""
    gpu: str = ""
    precision: str = ""
    notes: str = ""
    recompute: str = ""

    def holds(self, row: dict[str, str]) -> bool:
        """Whether the row is one of those."""
        patterns = {name: getattr(self, name) for name in self.__struct_fields__ if name != "set"}
        return all(
            re.search(pattern, row.get(column, "").lower())
            for column, pattern in patterns.items()
            if pattern
        )


class Counting(Struct, frozen=True):
    """How a source counts the FLOPs behind its TFLOP/s."""

    flops: Literal["model", "hardware"] = "model"  # hardware: recompute is counted
    attention: Literal["causal", "palm"] = "palm"


@cache
def source_facts() -> tuple[SourceFact, ...]:
    """The entries of ``data/sources.toml``."""
    text = resources.files("phalanx.plan").joinpath("data/sources.toml").read_text("utf-8")
    return convert(tuple(tomllib.loads(text)["fact"]), tuple[SourceFact, ...])


def with_source_facts(row: dict[str, str]) -> dict[str, str]:
    """The row with what its source is known for; what the row says itself wins."""
    known: dict[str, str] = {}
    for fact in source_facts():
        if fact.holds(row):
            known |= fact.set
    return known | {column: cell for column, cell in row.items() if cell}


def software_of_row(
    row: dict[str, str], family: str, mapping: Mapping
) -> tuple[Software, list[str]]:
    """The row's stack with the traits that it states, and what had to be assumed."""
    stated = row.get("stack", "").lower()
    names = [name for name in sorted(STACKS, key=len, reverse=True) if name in stated]
    software = STACKS[names[0]] if names else typical_software(family, mapping)
    traits = {column: row[column] for column in TRAITS if row.get(column)}
    try:
        software = with_traits(software, traits)
    except ConfigError as error:
        raise SkippedRowError(error.problems[0].rule) from None
    return software, [UNKNOWN_STACK] if stated and not names else []


def project_of(row: dict[str, str]) -> str:
    """Whose software it is: rows of one project are left out of a fit together."""
    source = row.get("source", "").lower().split("/")[0][:40]
    return row.get("project") or row.get("stack") or source or "unknown"


def counting_of(row: dict[str, str]) -> Counting:
    """How the row's TFLOP/s were counted."""
    flops, attention = row.get("counted_flops", "model"), row.get("attention_flops", "palm")
    if flops not in ("model", "hardware") or attention not in ("causal", "palm"):
        raise SkippedRowError(f"unknown count of FLOPs {flops!r}, {attention!r}")
    return convert({"flops": flops, "attention": attention}, Counting)


def routing_skew_of(row: dict[str, str]) -> float:
    """Spread of the experts' loads over their mean: none where balance is forced."""
    text = row.get("routing", "").lower()
    if not text or "real" in text:
        return ROUTING_SKEW["real"]
    if "balanc" in text:
        return ROUTING_SKEW["balanced"]
    raise SkippedRowError(f"routing = {text!r} is neither balanced nor real")


def trained_of(row: dict[str, str]) -> Literal["all", "adapters"]:
    """Whether all weights are trained, or adapters beside them."""
    text = row.get("trains", "").lower()
    return "adapters" if re.search(r"adapter|lora", text) else "all"
