"""The nodes that try a change first. What is set here wins over group_data/gpu.py, for example:

tier = "piecewise"
"""
