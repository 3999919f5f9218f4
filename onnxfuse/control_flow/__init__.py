"""The bodies of If, Loop and Scan as graphs of their own: what they read of the graphs around them, and its shapes."""
