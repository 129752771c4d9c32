"""Prints the folder for PYTHONPATH."""
import os

print(os.path.dirname(os.path.abspath(__file__)))
