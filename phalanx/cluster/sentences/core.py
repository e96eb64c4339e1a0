"""What the reasons of the core itself say."""

from __future__ import annotations

SENTENCES = {
    # handlers
    "moves": "moves that would make room: {count}",
    # sense
    "nonsense": "{kind}.{key} = {value}: {rule}",
}
