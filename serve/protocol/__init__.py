"""What clients write and read: V1, V2 with the binary extension, and OpenAPI."""
