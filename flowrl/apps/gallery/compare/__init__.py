"""The comparison of several runs, at the top of their common page."""
