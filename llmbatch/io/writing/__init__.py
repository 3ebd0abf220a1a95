"""Writes tables to files that appear whole or not at all.

Must not import `io.reading`.
Start reading at `output`.
"""
