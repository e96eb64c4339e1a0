"""Where the time and memory of a step go."""
