"""Files in object stores, by the URLs of fsspec: a run that names no URL imports nothing from here."""
