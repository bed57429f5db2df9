"""One file, one method."""
