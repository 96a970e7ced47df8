"""What this rank notes of itself: its log, its last calls, figures, a bar, names for a profiler.

Is told of calls and bytes; moves none, asks no other rank, and decides nothing.
"""
