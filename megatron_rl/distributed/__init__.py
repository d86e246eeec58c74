"""The world of processes: the host's devices, process groups, collectives, the watchdog, versions of packages."""
