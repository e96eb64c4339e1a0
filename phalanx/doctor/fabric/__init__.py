"""The network between nodes: what every pair and group reaches, and which part of it is bad."""
