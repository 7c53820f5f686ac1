"""Train small language models with frozen orthogonal Query/Key projections, and judge them honestly."""

__version__ = "0.1.0"
