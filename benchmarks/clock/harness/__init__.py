"""What the scripts beside it share: simulations, rows kept between runs, a shared queue, and a page of tables."""
