"""The commands, one file each. `target` holds the options they share, `output` how they print."""
