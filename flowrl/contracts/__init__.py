"""The contracts of samplers, methods, rewards and models, each a list of laws; `flowrl.check` tries them on yours."""
