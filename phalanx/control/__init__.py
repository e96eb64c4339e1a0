"""The I/O shell around the cluster's core: server, store, agent, and ways to get agents onto nodes.

The core decides; what is here stores its events, carries its commands and starts processes.
"""

from __future__ import annotations
