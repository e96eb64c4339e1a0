"""How processes of jobs are started and held, and what they print is kept."""
