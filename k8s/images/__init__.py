"""Container images: build contexts, OCI layouts, registries."""
