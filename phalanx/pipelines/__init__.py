"""From raw files to released weights: steps that run when what they read has changed, in order."""
