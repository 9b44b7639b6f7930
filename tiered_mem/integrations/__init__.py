"""One line in each framework: each file is for one of them, imports it, and is imported by nothing else here."""
