"""Changes to tables of a log that a damaged disk, or another version, might have made."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path


def change_file(path: Path, statement: str) -> None:
    """One statement on the file of a server that does not run."""
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(statement)
