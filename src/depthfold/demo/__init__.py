"""The demo: a small network and a part of Fashion-MNIST that ship with the package, compressed for this machine."""
