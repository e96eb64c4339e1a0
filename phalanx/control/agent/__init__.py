"""The process of a node."""
