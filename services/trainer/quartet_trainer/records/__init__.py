"""Records of a training: files in the run's folder, step metrics, traces."""
