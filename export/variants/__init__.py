"""Smaller and faster variants of the verified file: fp16 and int8, evaluated separately."""
