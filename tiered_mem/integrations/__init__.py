"""One line in each framework. Each file is for one, and imports it, and transformers' where that is below."""
