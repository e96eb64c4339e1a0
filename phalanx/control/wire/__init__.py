"""Frames and messages between server, agents and workers, each encoded in one place."""
