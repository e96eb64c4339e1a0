"""One file a resource of the HTTP API."""
