"""The command line, `beamjax`."""
