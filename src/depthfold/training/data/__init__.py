"""Images and labels: where they lie, which are held out, and how a step's batch is drawn, read and augmented."""
