"""Metrics and the journal of runs in SQLite."""
