"""A fleet in virtual time around the unchanged core."""
