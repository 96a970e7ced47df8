"""Tests of the doctor: its rules on made-up facts, and the command on broken set-ups."""
