"""One file, one reward."""
