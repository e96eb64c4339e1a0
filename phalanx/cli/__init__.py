"""The command line: one file a command, in folders by what people do; no logic of its own."""

from __future__ import annotations

from phalanx.cli.app import main

__all__ = ["main"]
