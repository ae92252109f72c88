"""What servers share: command line, host, interceptor, metrics, plug-ins. Clients need `quartet_common` alone."""
