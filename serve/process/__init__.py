"""The process of the service: sockets and listeners, workers, the admin and health ports, and an end without a loss."""
