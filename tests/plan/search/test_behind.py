"""What was measured of a pick, and what an unmeasured schedule must win by."""

from __future__ import annotations

from msgspec import structs

from phalanx.plan import PlanRequest, explain_plan, propose, understand
from phalanx.plan.cost.constants import Constants
from phalanx.plan.search.proposal import PlanProposal

ASKED = PlanRequest(
    model="llama3-70b", cluster="h100-64", tokens="1T", pipeline=8, tensor=8, batch="128k"
)
QUESTION = understand(ASKED)
PROVEN = {
    "1f1b": 200,
    "interleaved": 90,
    "zero-bubble": 50,
    "zb-h1": 50,
    "dense:hopper:bfloat16": 9,
}


def proposed(constants: Constants) -> PlanProposal:
    return propose(structs.replace(QUESTION, constants=constants))


def test_a_schedule_that_nobody_measured_must_win_by_its_margin() -> None:
    proven = structs.replace(QUESTION.constants, seen=PROVEN)
    doubted = structs.replace(proven, seen=PROVEN | {"zero-bubble": 0, "zb-h1": 0, "dualpipe": 0})
    first, second = proposed(proven), proposed(doubted)
    assert first.prediction.mapping.schedule == "zero-bubble"
    gain = second.prediction.step_seconds / first.prediction.step_seconds - 1
    explained = explain_plan(first.prediction, first.cluster, doubted)
    (margin,) = [row.margin for row in explained.evidence if row.margin]
    chosen = second.prediction.mapping.schedule
    assert (chosen == "zero-bubble") == (gain == 0.0)
    assert margin > 0.02 and (chosen == "zero-bubble" or gain < margin + 0.02)


def test_an_explanation_counts_the_runs_behind_the_pick() -> None:
    constants = structs.replace(QUESTION.constants, seen=PROVEN, runs={"phalanx:dense": 4})
    found = proposed(constants)
    explained = explain_plan(found.prediction, found.cluster, constants)
    runs = {row.what: row.runs for row in explained.evidence}
    assert runs["software phalanx"] == 4 and runs["dense models on hopper in bfloat16"] == 9
    assert runs[f"schedule {found.prediction.mapping.schedule}"] >= 50
    assert not any(row.margin for row in explained.evidence)
