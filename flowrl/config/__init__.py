"""YAML to typed, strict, resolved configuration."""
