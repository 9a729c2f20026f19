"""The choice of the next token of every sequence: penalties and masks, draws, and log probabilities."""
