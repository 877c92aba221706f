"""HTTP/1.1 and HTTP/2 from accept to close: parsing, flow control and the limits of clients.

It imports nothing else of the service, which uses it through three protocols: an `Application` answers requests, a
subclass of `IncomingRequest` adds what the service notes of each, and `Log` gets what is refused and what fails.
"""
