"""Pipelines that are no plans: shuffles, and streams read into files."""
