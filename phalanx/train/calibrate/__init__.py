"""What a device does, timed on it, for the planner."""
