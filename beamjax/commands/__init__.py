"""The commands of `beamjax` that work on a function: a file a command, and what they share."""
