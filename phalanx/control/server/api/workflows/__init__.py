"""Endpoints about work of several jobs: sweeps, pipelines."""
