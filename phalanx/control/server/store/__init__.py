"""The log, its snapshots and secrets, in SQLite or PostgreSQL."""
