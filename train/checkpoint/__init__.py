"""Checkpoints: written in the background, verified before use, and loaded with any number of processes."""
