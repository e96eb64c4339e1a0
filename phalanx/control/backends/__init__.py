"""Ways to get agents onto nodes: of this machine, of hosts, or of an engine that owns them.

A backend starts agents (and spares) as one gang and translates the site's facts for the core:
topology, deadlines, preemption, the state of nodes, accounting. Nothing outside of this folder
knows which engine it is.
"""

from __future__ import annotations
