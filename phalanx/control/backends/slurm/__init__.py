"""Slurm: a job as a batch script whose allocation holds agents, spares and, if wanted, the server.

Slurm grants nodes and takes them away; inside an allocation Phalanx deals with failures itself.
"""

from __future__ import annotations
