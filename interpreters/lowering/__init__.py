"""Makes each stage of a program a step of the plan."""
