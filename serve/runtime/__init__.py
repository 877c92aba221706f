"""A bundle as a model that runs: its session, where it is placed, its batches and pace."""
