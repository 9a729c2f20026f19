"""The files with which the console and the reports draw their plots: uPlot, and the language of their labels."""
