"""The launcher of Quartet on one machine."""
