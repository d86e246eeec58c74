"""Plain torch in place of packages that only a GPU can run, which refuse what the real ones would refuse."""
