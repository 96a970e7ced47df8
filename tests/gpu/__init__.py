"""Tests that need a CUDA device; skipped if there is none."""
