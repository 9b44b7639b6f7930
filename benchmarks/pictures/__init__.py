"""README's pictures, drawn from what is measured here and from the results of benchmarks."""
