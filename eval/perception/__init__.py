"""Vision transformers measured: rivals of merging, speed and accuracy of classification, a
report.
"""
