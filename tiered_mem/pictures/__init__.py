"""What a trace shows, as a picture and as a page."""
