"""Kubernetes objects as pure functions of configuration and bundle."""
