"""Memory below the device: pinned slots of the host, and what rests in them or goes further down."""
