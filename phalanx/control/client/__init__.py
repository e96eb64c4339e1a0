"""How commands and other programs reach a server."""
