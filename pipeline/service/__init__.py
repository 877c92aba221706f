"""The local prediction service: its process, roll-out and record."""
