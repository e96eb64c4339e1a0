"""Phalanx trains very large models on GPU clusters and keeps every GPU busy."""

__version__ = "0.1.0"
