"""Configurations of other tools as recipes of flowrl: one module reads a form, one table file holds a tool's keys."""
