"""What a run counts and times while it goes on, and where that is written."""
