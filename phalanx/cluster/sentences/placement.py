"""What the reasons of ``cluster.placement`` say: where a gang fits, and where it does not."""

from __future__ import annotations

SENTENCES = {
    # choose
    "placed": "nodes: {nodes}, leaves: {leaves}, pods: {pods}",
    "no_room_one": "it needs a node with {gpus} free GPUs, and none has them now",
    "no_room": "it needs {wanted} nodes with {gpus} free GPUs each (now: {free})",
    "no_domain_room": "it needs {wanted} groups of {wide} free nodes within an NVLink domain"
    " (now: {free})",
    "fleet_too_small": "it needs {wanted} nodes with {gpus} GPUs each, and the fleet has"
    " {fitting} that would do",
    "domains_too_small": "it needs {wanted} groups of {wide} nodes within an NVLink domain for"
    " {tensor} tensor ranks each, and the fleet has {fitting}",
    "tensor_across_slots": "tensor groups of {tensor} ranks cannot be cut into slots of"
    " {slot_gpus} GPUs; make one a multiple of the other",
    "no_nodes": "no node has joined yet: start one with `phalanx agent --join URL`, or a whole"
    " cluster on one machine with `phalanx up --nodes N`",
    "no_such_feature": "no node has the features it asks for: {words}",
    "no_such_nodes": "no node of the fleet has what it asks for together: {wish}",
}
