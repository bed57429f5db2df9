"""Putting a run together: its data, its model, its learner, each in a module of that name; `parts` is all of them."""
