"""What all sections of the tree share: their base, and numbers with bounds."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

# Upper bounds refuse slips of the hand, such as a zero too many; they lie well above any job.
Count = Annotated[int, Meta(ge=1, le=10**15)]
Natural = Annotated[int, Meta(ge=0, le=10**15)]
NaturalOrAuto = Annotated[int, Meta(ge=-1, le=10**15)]
Layers = Annotated[int, Meta(ge=0, le=10_000)]
Width = Annotated[int, Meta(ge=0, le=10_000_000)]
Heads = Annotated[int, Meta(ge=0, le=100_000)]
Vocabulary = Annotated[int, Meta(ge=0, le=100_000_000)]
Experts = Annotated[int, Meta(ge=1, le=100_000)]
Batch = Annotated[int, Meta(ge=1, le=10**9)]
Ranks = Annotated[int, Meta(ge=1, le=10_000_000)]
RanksOrAuto = Annotated[int, Meta(ge=0, le=10_000_000)]
Threads = Annotated[int, Meta(ge=1, le=4096)]
Seconds = Annotated[float, Meta(gt=0, le=1e8)]
Megabytes = Annotated[float, Meta(gt=0, le=1e6)]
Minutes = Annotated[float, Meta(ge=0, le=5_000_000)]  # some ten years
Positive = Annotated[float, Meta(gt=0, le=1e30)]  # what float32 holds, with room to calculate
NonNegative = Annotated[float, Meta(ge=0, le=1e30)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Below1 = Annotated[float, Meta(ge=0, lt=1)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections: immutable, keyword-only, unknown keys refused."""
