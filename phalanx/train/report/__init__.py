"""What a run writes down and shows."""
