"""HTTP/2, for gRPC: RFC 9113 and 7541, without a library."""
