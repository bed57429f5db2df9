"""Where a pipeline lies, which class it is, and how it is loaded."""
