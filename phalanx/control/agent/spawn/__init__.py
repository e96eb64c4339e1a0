"""How processes of jobs are started and held."""
