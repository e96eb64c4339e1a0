"""What the reasons of ``cluster.gang`` say: how a gang forms, runs and drains."""

from __future__ import annotations

SENTENCES = {
    # draining
    "bare": "it leaves before a checkpoint was made: it begins anew, unless it keeps its own",
    # failure_rates
    "failure_rate": "{rate} failures in 1,000 days of a node with eight GPUs are expected of nodes "
    "like its own ({nodes}; seen: {failures} in {days} days); the interval between checkpoints "
    "follows",
    # formation
    "from_nothing": "nothing is left to restore: it begins again, after {steps} steps",
    # orders
    "restore": "all slots have joined; step {step} comes from {source}",
    "fresh": "all slots have joined; there is nothing to restore",
    "go": "all ranks have restored step {step}",
    "go_program": "all ranks of its program may start",
    "drain": "it must leave: {why}",
    "stop": "the job no longer runs there",
    # the agent's machine
    "lease_over": "no controller has spoken to the node for {seconds} s",
    # progress
    "unsaved": "no durable checkpoint since step {durable}, though one is due every {every} "
    "steps: {steps} steps are only in the memory of its nodes (`phalanx logs` says why)",
    # left_memory
    "kept_memory": "its nodes keep its newest steps in memory for {seconds} s, unless others "
    "get them",
    "kept_too_long": "its nodes kept them in memory for {seconds} s: it did not start again",
    "kept_elsewhere": "it starts again without nodes that kept them in memory",
    "kept_for_nobody": "others got the nodes that kept them in memory",
    # losses
    "given_up": "{steps} committed steps ({first} to {last}) are lost, and are made again: {why}",
    "lost_steps": "{steps} committed steps ({first} to {last}) are lost: {why}",
    "memory_gone": "{nodes} went with what they kept in memory, and nobody has another copy",
    "memory_refused": "what its nodes keep in memory cannot be restored ({detail})",
    "memory_unused": "the site's policy restores nothing from memory",
    "memory_too_new": "its nodes keep nothing as old as step {step}, which it goes back behind",
    "no_common_step": "its nodes have no later step in common",
    "left_unsaved": "it left its nodes before they were written ({why})",
    # way_taken
    "recover": "{rung} after {cause} on {node}: estimated loss {loss} GPU-seconds; "
    "next best: {other}",
    "bear": "{rung} for {cause} on {node}: estimated loss {loss} GPU-seconds; next best: {other}",
    "started_again": "was started again, and goes on from what it saved itself: {rung} after "
    "{cause} on {node}",
    "recovered": "goes on from step {step}: {rung} after {cause} on {node}",
    "recovered_with_loss": "goes on from step {step}, {lost} committed steps back: {rung} "
    "after {cause} on {node}",
}
