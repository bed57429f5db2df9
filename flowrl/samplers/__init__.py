"""One file, one Gaussian transition."""
