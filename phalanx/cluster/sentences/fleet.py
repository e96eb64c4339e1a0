"""What the reasons of ``cluster.fleet`` say: nodes and their health."""

from __future__ import annotations

SENTENCES = {
    # evacuation
    "stays_on": "nothing is free to take the place of {node} ({what}): it goes on there until "
    "{seconds} s before the node must be empty, unless another one is free earlier",
    # health
    "suspected": "{cause}: {what}",
    "drain_ordered": "a person wants it empty",
    "drain_because": "a person wants it empty: {why}",
    "tested": "passed its check",
    "strikes": "suspected {times} times within a day, whatever its checks say",
    "lemon": "a score of {score} thousandths of an incident: it fails too often",
    "failed_test": "failed its check: {detail}",
    "no_test": "did not finish its check in time",
    "node_lost": "{cause}: {what}",
    "breaker": "{count} nodes would go within {minutes} min ({nodes}); a person decides",
    "test_before": "it must pass a check before it gets work",
    "quarantined_by": "quarantined by a person",
    "doubtful": "{cause}: it is kept away from work until it passes a check",
    "harmful": "{cause}: it is kept away from work until it is repaired",
    # fabric_checks
    "fabric_check": "measures {nodes} against each other and {peers} others",
    "fabric_check_for": "measures nodes before job {job} starts there",
    "fabric_check_limit": "it took longer than the policy gives a check",
    "fabric_check_broken": "it lost a node or a process, and is not made again with others",
    "fabric_check_gives_way": "a job lost nodes, and may need those that are measured",
    "fabric_check_first": "the fabric between its {nodes} nodes is measured; it starts within"
    " {span}, whatever comes of that",
    "fabric_not_checked": "the fabric between {nodes} was not measured: {problem}",
    "fabric_well": "the fabric between {nodes} nodes is well",
    "fabric_slow": "a fabric check: {what}",
    "fabric_slow_once": "a fabric check, the {times}. of {needed} that must agree before anything"
    " follows: {what}",
    "fabric_too_many": "a fabric check: {what}; it is not drained, as {count} nodes were within an"
    " hour: look at the fabric as a whole",
    # node_events
    "joined": "its agent registered",
    "bad_node": "a node cannot join: {problem}",
    "seen": "it speaks again",
    "drain_later": "accepted: the node is {state}, and will get no work when it is back",
    "notice": "the site takes it away ({cause})",
    "no_such_node": "there is no node {node}",
    "no_such_question": "question {question} is not open",
    "vouched": "a person vouches for it",
    "not_idle": "node {node} is {state}",
    "kept": "a person kept it in",
    # renewal
    "node_changed": "{node} is not what it was: {what}",
    "node_described": "{node} describes itself anew: {what}",
    # spare_pool
    "spare_of_fleet": "kept to replace others",
    "spare_not_needed": "the fleet needs fewer spares: it is for everybody",
    "spares_follow": "{nodes} nodes are kept as spares instead of {before}: as nodes of their kind"
    " and age fail, and with {away} until one is back, {percent} % of them are away at a moment",
    "lent": "a waiting job cannot start without it",
    "spare_in_window": "a reservation or maintenance has begun there",
}
