"""Clusters, chaos and a private Slurm on one machine: what tests, demo and benchmarks share."""
