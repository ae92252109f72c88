"""Sends the trained weights to the rollouts: read `publisher.Publisher._update` first."""
