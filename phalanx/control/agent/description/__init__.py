"""How an agent describes its node: what it was told, what engines say, what can be read."""

from __future__ import annotations

from phalanx.control.agent.description.describer import NodeDescriber
from phalanx.control.agent.description.node import base_node, described_node, offered_facts
from phalanx.control.agent.description.sources import DescriptionSources, told_facts

__all__ = [
    "DescriptionSources",
    "NodeDescriber",
    "base_node",
    "described_node",
    "offered_facts",
    "told_facts",
]
