"""`python -m llmbatch`."""

from llmbatch.cli import main

raise SystemExit(main())
