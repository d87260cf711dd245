"""Where weights come from: a directory, a GGUF file, the Hub, a loaded model, or new tensors for a running engine."""
