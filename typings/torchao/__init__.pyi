"""The part of torchao that flowrl uses; an optional package (extra `quant`)."""
