"""Time a model before and after fusing, time each operator alone, and show the times."""
