"""The process that holds snapshots in memory: itself, its peers, and how ranks reach it."""
