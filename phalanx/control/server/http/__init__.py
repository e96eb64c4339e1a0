"""The HTTP front: connections, routes, the table of endpoints, streams."""
