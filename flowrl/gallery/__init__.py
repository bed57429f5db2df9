"""The static HTML report of one or several runs."""

from flowrl.gallery.builder import build

__all__ = ["build"]
