"""Tables: rows grouped by a key, joined, or read from a pipeline, and results by key."""
