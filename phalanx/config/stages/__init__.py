"""Stages of a run: how its batch, the length of its samples and its mixture change on the way."""
