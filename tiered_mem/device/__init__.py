"""One device: its streams and events, the copies between it and the host, and how fast those are."""
