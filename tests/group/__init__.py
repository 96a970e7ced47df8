"""Tests that run the same body on every rank."""
