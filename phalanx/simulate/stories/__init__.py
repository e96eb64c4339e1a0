"""Incidents as detective stories: a scene to play, commands to look with, and what it was."""
