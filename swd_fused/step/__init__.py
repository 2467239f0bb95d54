"""Takes a step: its sums, the schedule that follows from them, and the ways to call it."""
