"""Where files, jobs and results are kept."""
