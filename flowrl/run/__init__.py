"""A session, the trainer, checkpoints, the run folder, reports and exports."""
