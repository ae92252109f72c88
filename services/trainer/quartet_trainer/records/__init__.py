"""What a run leaves in its folder, and what it tells the broker's stream."""
