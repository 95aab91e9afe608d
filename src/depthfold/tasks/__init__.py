"""Tasks that ship: image classification over several data sets."""
