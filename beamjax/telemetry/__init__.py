"""What a run counts and times, and where that is written."""
