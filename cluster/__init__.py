"""The router and everything around it: configuration, sessions, policies, commands, measurements."""
