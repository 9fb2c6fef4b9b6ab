"""Checks that any implementation of the data plane can be run against."""
