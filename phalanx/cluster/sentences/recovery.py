"""What the reasons of ``cluster.recovery`` say: failures, and what is done about them."""

from __future__ import annotations

SENTENCES = {
    "killed_again": "ended from outside {times} times without progress: it is tried again in "
    "{seconds} s",
    # agent_ends
    "ends_agents": "quarantined: agents ended while they started it ({nodes}); an operator"
    " looks at their logs, and cancels it or lets it in again (phalanx resume)",
    "sibling_ends_agents": "quarantined with job {job} of its array, whose start ended agents",
    # growth
    "grow": "{added} more replicas: shorter steps are worth {faster} GPU-seconds, the pause costs"
    " {pause}, and failures of more nodes {failures}",
    "stays_small": "nodes for {added} more replicas are there, but would not pay: shorter steps are"
    " worth {faster} GPU-seconds, the pause costs {pause}, and failures of these nodes {failures}",
    "stands_by_no_more": "the job that it stood by for has all its replicas again: it is for"
    " everybody",
    # incoming
    "safer": "{node} comes in rather than {other}: of nodes like it {rate} fail in 1000 days, of"
    " the other's {other_rate}",
    # incidents
    "hang": "no step after step {step} ({nodes}){evidence}: Phalanx ends its processes and "
    "starts them again",
    "idle": "reports no steps, and shows no activity{evidence}. It is left alone: to have it "
    "restarted then, submit it with --idle-minutes, or set timeouts.idle_restart",
    "idle_hang": "reports no steps, and shows no activity{evidence}: Phalanx ends its "
    "processes and starts them again",
    "warned": "{detector} found {node}, but has cried wolf too often: only a warning",
    "regression": "steps take {percent} % longer than before",
    "starved": "{percent} % of the time is spent waiting for data",
    "spike": "the loss jumped at step {step}",
    "spike_back": "the loss jumped at step {step}: back to step {clean}",
    "corrupt": "ranks that must come to the same bits disagree since step {step}; the last good "
    "one is {clean}",
    "corrupt_unknown": "ranks that must come to the same bits disagree since step {step}, and "
    "nobody knows which is wrong",
    "third_opinion": "{node} gives way: ranks disagree at step {step} for the second time",
    "keeper_silent": "the keeper on {node} has not answered for {seconds} s: it trains on, "
    "without snapshots meanwhile (the newest is of step {step})",
    "keeper_answers": "the keeper on {node} answers again: there are snapshots again",
    "keeper_replaced": "the keeper on {node} has not answered for {seconds} s and is replaced: "
    "it goes back to its last snapshot",
    "stuck": "did not answer twice ({nodes})",
    "drain_on": "its last {steps} steps are not safe yet: it is given more time to leave",
    # own_failures
    "same_step": "failed {times} times in a row at step {step}, the same way and without "
    "progress; last: {evidence}",
    "same_error": "failed {times} times in a row the same way, without progress; last: {evidence}",
    "no_formation": "could not form {times} times in a row; last: {evidence}",
    "cannot_run": "{evidence}; it is not tried again",
    "retries": "failed more often than its {retries} retries in {minutes} minutes, without "
    "progress; last: {evidence}",
    "backs_off": "failure {times} without progress: it starts again in {seconds} s; last: "
    "{evidence}",
    "storage_wait": "its storage failed: {evidence} It is tried again in {seconds} s (attempt "
    "{times} of {tries} failed)",
    "room_wait": "there is no room for the checkpoint of step {step}: {steps} steps are only "
    "in the memory of its nodes. Make room: it is written again in {seconds} s "
    "(attempt {times} of {tries} failed)",
    # recover
    "change_taken_back": "goes on as it was before the change, since it made no step as changed:"
    " {why}",
    "remapped": "goes on as {after} instead of {before}, on {nodes} of its {of} nodes, until the"
    " others are back",
    "parted": "ranks lost each other {times} times at step {step}: they meet again in "
    "{seconds} s; last: {evidence}",
    "fenced": "it starts in {seconds} s: until then its program may still run on a node that it"
    " left",
    "saves_first": "{why}. It is given up; first it forms once more to save its newest steps",
    "abort": "{cause} on {node}",
    "node_leaves": "it cannot stay on {node} ({what}), and nothing is free to take its place",
    "drain_broken": "broke while it was asked to leave ({cause})",
    "saves_again": "broke while it was asked to leave ({cause}): it forms once more to save"
    " its newest steps",
}
