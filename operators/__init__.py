"""Doors into llmbatch from dataframes and pipelines."""
