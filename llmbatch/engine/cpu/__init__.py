"""Runs a model on the processor.

Must not import `engine.gpu`.
Start reading at `engine`.
"""
