"""The device that training runs on: kernels, compilation, memory, and how much of its speed is used."""
