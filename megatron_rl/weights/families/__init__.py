"""The families of models that are built here: one file each, and a line each in register.py."""
