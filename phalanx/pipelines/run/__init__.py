"""Execution of a pipeline's run: its folder, its processes and its driver."""
