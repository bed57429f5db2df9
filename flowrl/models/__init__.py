"""One file, one native model family."""
