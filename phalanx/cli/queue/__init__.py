"""Commands about the queue: who waits, for what, and what is kept for whom."""
