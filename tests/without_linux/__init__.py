"""objcomm in a world of one on a simulated system that is not Linux."""
