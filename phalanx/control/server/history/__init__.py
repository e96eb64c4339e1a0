"""What people look back at: runs, incidents, the fleet over time."""
