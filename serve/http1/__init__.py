"""HTTP/1.1: one connection, its heads, and the port."""
