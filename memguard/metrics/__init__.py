"""Pure functions: arrays in, estimate and interval out. No model, no files, no torch."""
