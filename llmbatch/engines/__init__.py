"""Executes the steps that a scheduler decides. The seam is `llmbatch.engines.base`; torch is imported below it."""
