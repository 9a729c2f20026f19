"""The tasks of the pipeline handler: one class per way to run a model. Importing it imports torch."""
