"""Steps that run in a process of their own: check, prepare, package, deploy."""
