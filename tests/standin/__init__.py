"""The device path without an accelerator: a type of device and its backend, made in Python.

``device`` is the type of device ``standin``; ``backend`` joins ranks whose tensors lie on it.
Setting them up changes a process for good, so each test has ranks of its own.
"""
