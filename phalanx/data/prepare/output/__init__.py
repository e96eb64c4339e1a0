"""What is left, as tokens: encoded, packed into shards, traced back to its sources, reported."""
