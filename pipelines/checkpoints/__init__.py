"""The state of a run, saved and read again."""
