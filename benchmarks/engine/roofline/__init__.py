"""What steps are measured, and what bounds them."""
