"""A suite at work: drawing, judging, scoring, comparing."""
