"""How a benchmark hands over its figures: the bars stand in the registry, not in the benchmark."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from proof.claim import judge
from proof.claims import CLAIMS
from proof.machine import QUIET_SHARE, busy_share

FIGURES_VARIABLE = "PHALANX_FIGURES"  # the file that `python -m proof` reads


def report(claim_name: str, figures: Mapping[str, float]) -> int:
    """Hand figures to whoever measures the claim, else judge them here. The exit code."""
    claim = CLAIMS[claim_name]
    if path := os.environ.get(FIGURES_VARIABLE):
        Path(path).write_text(json.dumps(dict(figures)))
        return 0
    trusted = busy_share() <= QUIET_SHARE
    known = {name: value for name, value in figures.items() if name in _names(claim_name)}
    verdicts = judge(claim, known, {}, trusted=trusted)
    measured = [verdict for verdict in verdicts if verdict.value is not None]
    print(f"\n{claim_name}: {claim.says}")
    for verdict in measured:
        state = f"MISSED, {verdict.problem}" if verdict.problem else verdict.figure.bar
        print(f"  {verdict.figure.says}: {verdict.words}   {state}")
    if not trusted:
        print("  others use the cores: what depends on the machine is shown, not judged")
    return 1 if any(verdict.problem for verdict in measured) else 0


def _names(claim_name: str) -> set[str]:
    return {figure.name for figure in CLAIMS[claim_name].figures}
