"""Every page and picture of README and docs/ that a program makes; README.md has the commands."""
