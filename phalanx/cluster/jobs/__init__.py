"""A job from submission to its end."""
