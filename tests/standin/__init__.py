"""The device path without an accelerator: a device type and its backend, written in Python.

``device`` is the device type ``standin``; ``backend`` connects ranks whose tensors are on it.
Setting them up changes a process permanently, so each test has its own ranks.
"""
