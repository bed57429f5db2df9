"""What makes a model fit: memory options, compiled and checkpointed blocks, encoders that are freed."""
