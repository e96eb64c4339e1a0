"""Acceptance of a node: all of it under load for a while, what it reached, and a certificate."""
