"""What a process shows while it works: console, progress, phases."""
