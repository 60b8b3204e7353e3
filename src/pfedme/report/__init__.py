"""Turns records into tables, figures and sentences. Nothing here simulates."""
