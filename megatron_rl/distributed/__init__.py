"""The processes of a run: the host's devices, process groups, collectives, the watchdog, versions of packages."""
