"""Checks of the network between nodes: when one is made, its job, and what its verdict leads to."""
