"""The decoder, its files, its tokenizer, and the models that have a name."""
