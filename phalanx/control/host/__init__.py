"""What any of our processes asks of its machine."""
