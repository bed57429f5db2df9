"""What the verifier of the shapes world sees in an image."""
