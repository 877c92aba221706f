"""Wire formats: V1, V2 with the binary data extension, and the OpenAPI document."""
