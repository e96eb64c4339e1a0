"""The HTTP front: connections, endpoints, streams, and what they show."""
