"""Races of implementations on the user's own machine."""

SUBJECT = "The race"
"""The first words of error messages."""
