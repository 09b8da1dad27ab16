"""From stages to the steps of a plan."""
