"""What torch's own tests expect of every optimizer, in our words, with AdamW as the yardstick.

torch's test files are not in its wheel. Its `OptimizerInfo` machinery is, but needs `expecttest`, which torch does not
bring.
"""
