"""Rules that refuse what cannot run, with the nearest fix."""
