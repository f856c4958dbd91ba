"""One metric a file: pure functions on images or features."""
