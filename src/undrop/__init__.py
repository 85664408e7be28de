"""undrop."""
