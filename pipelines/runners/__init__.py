"""Connects to Beam's runners, and completes their options."""
