"""What workers do: DoFns, CombineFns, and how their errors travel."""
