"""Records → tables, figures, words. Nothing here simulates."""
