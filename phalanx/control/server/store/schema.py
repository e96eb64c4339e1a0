"""Tables of the log in both databases, and how those of an older format become those of today."""

from __future__ import annotations

from phalanx.cluster.snapshot import FORMAT_VERSION

# {integer} and {blob} are the database's own names.
TABLES = """
CREATE TABLE IF NOT EXISTS events
    (sequence {integer} PRIMARY KEY, time_ns {integer}, body {blob}, chain {blob});
CREATE TABLE IF NOT EXISTS commands (sequence {integer} PRIMARY KEY, body {blob}, seal {blob});
CREATE TABLE IF NOT EXISTS snapshots
    (sequence {integer} PRIMARY KEY, version TEXT, core {blob}, answers {blob}, chain {blob},
     seal {blob});
CREATE TABLE IF NOT EXISTS aside
    (sequence {integer} PRIMARY KEY, body {blob}, why TEXT, seal {blob});
CREATE TABLE IF NOT EXISTS tokens (id TEXT PRIMARY KEY, record {blob}, seal {blob});
CREATE TABLE IF NOT EXISTS secrets (name TEXT PRIMARY KEY, value {blob}, seal {blob});
"""
# What formats from 2 on have beside these; a log without ``log_format`` is of format 1.
FORMAT_TABLES = """
CREATE TABLE IF NOT EXISTS log_format
    (one INTEGER PRIMARY KEY CHECK (one = 1), version {integer}, package TEXT);
CREATE TABLE IF NOT EXISTS repairs
    (epoch {integer} PRIMARY KEY, after_sequence {integer}, time_ns {integer}, what TEXT);
"""
# Checksums that format 1 had not.
CHECKSUMS = """
ALTER TABLE events ADD COLUMN chain {blob};
ALTER TABLE commands ADD COLUMN seal {blob};
ALTER TABLE snapshots ADD COLUMN chain {blob};
ALTER TABLE snapshots ADD COLUMN seal {blob};
ALTER TABLE aside ADD COLUMN seal {blob};
ALTER TABLE tokens ADD COLUMN seal {blob};
ALTER TABLE secrets ADD COLUMN seal {blob};
"""
NEW_FORMAT = f"INSERT INTO log_format VALUES (1, {FORMAT_VERSION}, '') ON CONFLICT DO NOTHING;"


def statements(text: str, integer: str, blob: str) -> list[str]:
    """Single statements of a script, in a database's own words."""
    filled = text.format(integer=integer, blob=blob)
    return [each.strip() for each in filled.split(";") if each.strip()]
