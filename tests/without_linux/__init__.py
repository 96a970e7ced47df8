"""objcomm alone on a system that is not Linux, which Python is told that it runs on."""
