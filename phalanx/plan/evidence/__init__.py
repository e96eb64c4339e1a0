"""Published runs against which the planner is checked and calibrated."""
