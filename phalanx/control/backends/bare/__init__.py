"""Bare metal: agents as systemd services, put onto hosts over SSH, a few at a time."""

from __future__ import annotations
