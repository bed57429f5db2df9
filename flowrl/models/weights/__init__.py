"""What is trained of a model, or saved of it: weights and their roles, LoRA kinds, whole weights, precision."""
