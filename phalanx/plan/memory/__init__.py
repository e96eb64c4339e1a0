"""Bytes on a rank: parameters, activations, the worst moment of a step."""
