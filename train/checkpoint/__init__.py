"""Checkpoints: complete and verified, or absent. Written while training goes on, shared out anew when they are read."""
