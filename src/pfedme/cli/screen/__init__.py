"""Output for people: progress while a command runs, tables and sentences at the end."""
