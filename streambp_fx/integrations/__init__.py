"""One line for trainers whose loss is not computed inside the model.

A model that computes its own loss needs nothing from here: ``model.compile(backend="streambp")``
before it is handed to the trainer is the line.
"""
