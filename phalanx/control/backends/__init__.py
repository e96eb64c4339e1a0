"""Ways to get agents onto nodes that another engine owns: Slurm, Ray, Kubernetes.

A backend starts agents (and spares) as one gang and translates the site's facts for the core:
topology, deadlines, preemption, the state of nodes, accounting. Nothing outside of this folder
knows which engine it is.
"""

from __future__ import annotations
