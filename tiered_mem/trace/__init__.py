"""What a manager did and when: figures of the overlap, and a timeline for a viewer."""
