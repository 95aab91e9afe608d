"""T[i, j], measured on the machine and the runtime that will run the network."""
