"""What the reasons of ``cluster.gang`` say: how a gang forms, runs and drains."""

from __future__ import annotations

SENTENCES = {
    # draining
    "bare": "it leaves before a checkpoint was made: it begins anew, unless it keeps its own",
    # formation
    "from_nothing": "nothing is left to restore: it begins again, after {steps} steps",
    # orders
    "restore": "all slots have joined; step {step} comes from {source}",
    "fresh": "all slots have joined; there is nothing to restore",
    "go": "all ranks have restored step {step}",
    "drain": "it must leave: {why}",
    "stop": "it has no business there any more",
    # progress
    "unsaved": "no durable checkpoint since step {durable}, though one is due every {every} "
    "steps: {steps} steps are only in the memory of its nodes (`phalanx logs` says why)",
}
