"""Where each value lives: on the server, or along the members of a placement."""
