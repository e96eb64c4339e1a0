"""What the reasons of ``cluster.queue`` say: who starts, and who makes room."""

from __future__ import annotations

SENTENCES = {
    # cycle
    "first_in_line": "it was the first in line, with priority {priority}; {where}",
    "backfilled": "it is in nobody's way; {where}",
    "backfilled_shorter": "it is in nobody's way with a limit of {limit}, as it accepts; {where}",
    "elastic_start": "there is room for {replicas} of {wanted} replicas; {where}",
    "shrunk_for": "job {job} needs nodes, and {replicas} replicas are enough for this one",
    # limits
    "at_ceiling": "its team {team} holds {held} GPUs and may hold {ceiling}; this job needs {gpus}",
    "at_qos_limit": "jobs of class of service {qos} hold {held} GPUs and may hold {most}; this"
    " job needs {gpus}",
    # site_orders
    "no_such_reservation": 'there is no reservation "{name}" to remove',
    "reserved_already": 'reservation "{other}" keeps {nodes} for some of that time: name other'
    " nodes or another time, or remove it",
    "reserved_elsewhere": "fewer than {gpus} GPUs are on nodes that no other reservation"
    " ({others}) keeps for some of that time",
    # window_nodes
    "window_short": 'reservation "{name}" lost nodes, and {less} of its {gpus} GPUs cannot be '
    "had elsewhere: bring nodes back, or move it",
}
