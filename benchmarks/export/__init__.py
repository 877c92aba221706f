"""What exported graphs cost to run."""
