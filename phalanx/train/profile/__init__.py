"""What a profile needs of a rank: a trace of a few steps, and what no trace says."""
