"""Weights somebody else has trained: found, matched with a task's model, and read by those who keep them."""
