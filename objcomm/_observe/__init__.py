"""What this rank records about itself: log, latest calls, counters, progress bar, profiler spans.

This package is notified of calls and bytes. It does not move data, communicate with other ranks, or
make decisions.
"""
