"""Races of implementations on the user's own machine."""

WHO = "The race"
"""Who refuses, in errors."""
