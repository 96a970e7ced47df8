"""Tests of the doctor: its rules on invented facts, and the command on broken setups."""
