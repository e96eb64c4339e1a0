"""Connections of agents: who is let in, what they say, what they are told."""
