"""The server's process: leading, replaying, serving, and what it does beside that."""
