"""What a person asks of the planner, and the answer as other packages read it."""
