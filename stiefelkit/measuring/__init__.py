"""Measuring this machine and what runs on it: races, drift, growth, and a page about them all."""
