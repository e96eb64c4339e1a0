"""Every message played: real agents and controllers on a small fleet under gray faults."""
