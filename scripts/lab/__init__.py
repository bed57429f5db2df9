"""The lab: recipes measured on their seeds, and experiments of their own; README.md has the commands."""
