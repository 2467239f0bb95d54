"""One harness for step times: what takes turns, how it is timed, what is written and printed."""
