"""One rank is killed at any point of any operation, while another one computes for long."""
