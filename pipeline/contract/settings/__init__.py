"""Sections of pipe.yaml."""
