"""The access to files in object stores by fsspec's URLs; a run without a URL imports nothing from here."""
