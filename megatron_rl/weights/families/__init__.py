"""The families of models that are built here: one file for each, and one line for each in register.py."""
