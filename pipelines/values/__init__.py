"""Values between the pipelines of a run."""
