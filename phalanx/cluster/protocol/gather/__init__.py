"""Answers of agents, gathered into one event a gang and phase."""

from phalanx.cluster.protocol.gather.machine import Gather

__all__ = ["Gather"]
