"""What a person sees: progress while something is under way, tables and sentences at the end."""
