"""One line in each framework: each file is for one of them, and imports it. What is built on
transformers takes its callback."""
