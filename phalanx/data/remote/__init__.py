"""Corpora in object stores, and copies on the node."""
