"""Keys, certificates and secrets that server, agents and clients share."""
