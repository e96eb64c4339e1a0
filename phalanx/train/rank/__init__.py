"""The processes of a run: start, loop, orders, end."""
