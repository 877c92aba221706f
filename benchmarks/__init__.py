"""What is claimed about speed, runnable, beside the peers."""
