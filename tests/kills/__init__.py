"""One rank is killed at any place of any operation, while another one computes for long."""
