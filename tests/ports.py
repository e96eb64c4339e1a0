"""Ports for servers of tests."""

from __future__ import annotations

from phalanx.testing.ports import free_port

__all__ = ["free_port"]
