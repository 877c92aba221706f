"""Restarts, preemption and rendezvous of the training processes."""
