"""Which accelerator and which settings of Ray fit a model, and the model files that say so; no Ray is needed."""
