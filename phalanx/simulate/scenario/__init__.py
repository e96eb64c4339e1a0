"""What is simulated: fleet, faults and jobs."""
