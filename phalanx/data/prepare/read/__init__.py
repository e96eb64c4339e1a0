"""Documents out of raw files for ``phalanx data prepare``."""
