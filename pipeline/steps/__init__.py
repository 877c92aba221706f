"""Steps that run in a process of their own: prepare, package, deploy."""
