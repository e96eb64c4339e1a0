"""What is measured on a node, and its way to the server."""
