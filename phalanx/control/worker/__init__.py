"""A rank under an agent, and what any program may tell its agent."""
