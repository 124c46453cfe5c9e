"""The command-line interface. Knows the public API only."""
