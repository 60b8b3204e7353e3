"""Models of a finished run for its clients and for newcomers."""
