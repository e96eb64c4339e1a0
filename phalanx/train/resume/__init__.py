"""What a run starts from, and when it saves."""
