"""Report the changes of an optimization and their estimated gain, as JSON, as an HTML page and in the terminal."""
