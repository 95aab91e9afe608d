"""Jobs: run many independent ones, in process, in processes of this machine, or on a Ray cluster."""
