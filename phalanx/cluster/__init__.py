"""The pure core: jobs, nodes, gangs, quotas, placement, health, recovery and the ledger.

No I/O, no clock, no unseeded randomness: ``commands = core.handle(event)``.
"""

from __future__ import annotations
