"""What clients and servers share. It imports neither torch nor a service."""

__version__ = "0.1.0"

CONTRACT_MAJOR = 1
CONTRACT_MINOR = 0
