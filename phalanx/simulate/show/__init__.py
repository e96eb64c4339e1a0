"""What a simulation found, for people."""
