"""Messages, and the machines of agent and gang."""
