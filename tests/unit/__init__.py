"""Tests that need one process."""
