"""The search of ``phalanx tune``: settings, predictions, racing under noise; it runs no trial."""
