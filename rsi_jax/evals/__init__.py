"""Measuring policies and credit against what is known to be true."""
