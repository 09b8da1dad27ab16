"""Tables: rows grouped by a key, or read from a pipeline, and results by key."""
