"""What a person asks of the planner, as a question that it can answer, and as a job file."""
