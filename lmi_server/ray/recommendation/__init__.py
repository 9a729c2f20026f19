"""The accelerator and the settings of Ray that fit a model, and the model files for them; no Ray is needed."""
