"""Runners and their options."""
