"""People who judge the samples of a run: their votes as files, what they are asked, and how a run waits for them."""
