"""policy="auto" beside others on the modelled clock: see `python -m benchmarks.planned -h`."""
