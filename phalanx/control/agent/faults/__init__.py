"""Where an agent hears that something on its node is wrong: each source gives typed facts.

Parsers are pure functions from text or numbers to facts; ``FaultSources`` runs them.
"""

from __future__ import annotations

from phalanx.control.agent.faults.sources import FaultSources

__all__ = ["FaultSources"]
