"""Command lines of the programs that pods run."""
