"""A Slurm of real daemons on loopback, and jobs on it."""
