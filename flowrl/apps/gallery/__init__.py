"""The static HTML report of one or several runs."""

from flowrl.apps.gallery.builder import build

__all__ = ["build"]
