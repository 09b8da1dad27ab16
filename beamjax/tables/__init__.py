"""Members made by pipelines of Beam, and results by key."""
