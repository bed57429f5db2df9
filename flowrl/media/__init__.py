"""Images and videos as files, in 8 bits."""
