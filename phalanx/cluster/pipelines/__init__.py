"""Pipelines in the core: a run as a pure state machine, and the jobs of its steps."""
