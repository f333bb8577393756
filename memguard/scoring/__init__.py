"""The model-facing part: tokens in, log-probabilities out, and the model left exactly as it was found."""
