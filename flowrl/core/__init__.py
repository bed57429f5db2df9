"""Types, random numbers by identity, the registry, errors with their exit codes, files, images and the console."""
