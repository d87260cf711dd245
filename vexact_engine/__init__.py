"""A thin inference engine that consumes vexact_ops alone."""
