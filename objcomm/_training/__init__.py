"""Helpers for training loops: models, metrics, data, and code that runs on one rank only.

Built on the operations of the layers below; does not know how the ranks were started.
"""
