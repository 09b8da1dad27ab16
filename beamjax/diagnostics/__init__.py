"""What a plan does, and what it takes: facts, text, graphs, memory and time."""
