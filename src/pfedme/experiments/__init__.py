"""The paper's table, figures and theorems, as lists of runs and what they show."""
