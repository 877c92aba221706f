"""Kubernetes: manifests, images and the edge to a cluster; importing it needs no client and no cluster."""
